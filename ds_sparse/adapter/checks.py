"""What the engine must be like. Everything that cannot be run is refused here, by name and with the reason."""

from __future__ import annotations

from typing import Any

import torch

from ..config import SECTION, CommunicationConfig
from ..errors import ConfigError
from ..shard import Exclusion
from . import versions


def check_engine(engine: Any, config: CommunicationConfig) -> None:
    """Refuses engines that level 1 cannot serve. Runs before the optimizer is built.

    Raises:
        ConfigError: names the setting as the user wrote it, its value, what is allowed and what to do.
    """
    stage = int(engine.zero_optimization_stage())
    refusals = (
        *_refused_parallelism(engine),
        *_refused_zero(engine, stage),
        *_refused_precision(engine, stage),
        *_refused_sharding(config, stage),
        *_refused_clipping(engine, config),
    )
    for wrong, setting, allowed, remedy in refusals:
        if wrong:
            raise ConfigError(f"{setting}; with '{SECTION}' allowed is {allowed}. What to do: {remedy}.")
    _check_embeddings(engine.module)


Refusal = tuple[bool, str, str, str]  # wrong, the setting with its value, what is allowed, what to do


def _refused_parallelism(engine: Any) -> list[Refusal]:
    sequence = int(engine.sequence_parallel_size)
    return [
        (
            bool(engine.pipeline_parallelism), "the model is a PipelineModule", "a model without pipeline stages",
            f"use another engine, or set '{SECTION}.enabled' to false",
        ),
        (
            bool(engine.has_moe_layers), "the model has mixture-of-experts layers", "a model without them",
            f"set '{SECTION}.enabled' to false",
        ),
        (
            sequence > 1, f"sequence parallelism is {sequence}", "1", f"set it to 1, or '{SECTION}.enabled' to false",
        ),
    ]  # fmt: skip


def _refused_zero(engine: Any, stage: int) -> list[Refusal]:
    zero = "'zero_optimization"
    return [
        (
            stage == 3, f"{zero}.stage' is 3", "0, 1 or 2: stage 3 gathers parameters across nodes at every layer",
            "use stage 1 or 2",
        ),
        (
            bool(engine.zero_offload_optimizer()) and engine.zero_offload_optimizer().device != "none",
            f"{zero}.offload_optimizer' is on", "off", "remove it",
        ),
        (versions.uses_zenflow(engine), f"{zero}.zenflow' is on", "off", "remove it"),
        (
            bool(engine.zero_elastic_checkpoint()), f"{zero}.elastic_checkpoint' is true",
            "false: ZeRO's state is cut for the ranks of one node", "remove it",
        ),
        (
            not engine.gradient_average, "gradients are summed", "gradients that are averaged",
            "remove 'gradient_allreduce_op'",
        ),
    ]  # fmt: skip


def _refused_precision(engine: Any, stage: int) -> list[Refusal]:
    model_dtype, accumulation_dtype = engine.get_data_types()
    autocast = versions.autocast_dtype(engine)
    return [
        (
            stage == 0 and bool(engine.fp16_enabled()), "'fp16.enabled' is true at ZeRO stage 0",
            "fp32 or bf16 there: DeepSpeed from 0.18.3 on steps on unscaled gradients as if they were scaled",
            "set 'zero_optimization.stage' to 1",
        ),
        (
            stage == 0 and bool(engine.bfloat16_enabled()) and versions.spoils_bf16_at_stage_0(),
            "'bf16.enabled' is true at ZeRO stage 0", "fp32 there: DeepSpeed before 0.18.6 hands out such gradients "
            "flattened, or with a loss scale", "set 'zero_optimization.stage' to 1, or use DeepSpeed 0.18.6 or later",
        ),
        (
            stage == 0 and autocast is not None, "'torch_autocast.enabled' is true at ZeRO stage 0",
            "false there", "set 'zero_optimization.stage' to 1",
        ),
        (
            autocast == torch.float16, "'torch_autocast.dtype' is float16",
            "bfloat16: the scale of float16 is kept where residuals would scale with it",
            "set it to \"bfloat16\", or use 'fp16' in its place",
        ),
        (
            stage == 1 and model_dtype == torch.bfloat16 and accumulation_dtype == torch.float32,
            "'data_types.grad_accum_dtype' is fp32 with bf16 at ZeRO stage 1",
            "bf16 there: DeepSpeed runs this mix without ZeRO's partitions", "use stage 2, or leave the key out",
        ),
    ]  # fmt: skip


def _refused_sharding(config: CommunicationConfig, stage: int) -> list[Refusal]:
    setting = f"'{SECTION}.sharded_update' is {str(config.sharded_update).lower()}, ZeRO stage is {stage}"
    return [
        (
            config.sharded_update is True and stage == 0, setting, "true at stage 1 or 2",
            "set 'zero_optimization.stage' to 1, or leave sharded_update out",
        ),
        (
            config.sharded_update is False and stage > 0, setting, "false at stage 0",
            "set 'zero_optimization.stage' to 0, or leave sharded_update out",
        ),
    ]  # fmt: skip


def _refused_clipping(engine: Any, config: CommunicationConfig) -> list[Refusal]:
    tensor_parallel = engine.mpu is not None and engine.mpu.get_model_parallel_world_size() > 1
    return [
        (
            config.method != "dense" and tensor_parallel and engine.gradient_clipping() > 0,
            f"'gradient_clipping' is {engine.gradient_clipping()} with tensor parallelism",
            "0: parameters that are replicated over tensor-parallel ranks would count twice in the norm",
            "set 'gradient_clipping' to 0, or method to 'dense'",
        ),
    ]  # fmt: skip


def _check_embeddings(module: torch.nn.Module) -> None:
    for name, child in module.named_modules():
        if getattr(child, "sparse", False) and isinstance(child, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            raise ConfigError(
                f"the embedding '{name}' has sparse=True; with '{SECTION}' allowed is sparse=False. What to do: build "
                f"it without sparse=True, its gradient is then compressed like any other."
            )


def check_exclusion(engine: Any, exclusion: Exclusion, config: CommunicationConfig) -> list[str]:
    """Refuses an exclusion that leaves nothing to compress; returns a warning for each pattern that finds nothing."""
    trained = {name: param.numel() for name, param in engine.module.named_parameters() if param.requires_grad}
    if config.method != "dense" and all(exclusion.covers(name, numel) for name, numel in trained.items()):
        raise ConfigError(
            f"'{SECTION}.exclude' is {config.exclude.model_dump()} and covers all {len(trained)} trained parameters; "
            f"allowed is an exclusion that leaves something to compress. What to do: lower exclude.min_numel (the "
            f"largest parameter has {max(trained.values(), default=0)} elements), or remove patterns."
        )
    unused = exclusion.unused(trained)
    return [f"'{SECTION}.exclude.patterns' has {pattern!r}, which finds no parameter" for pattern in unused]


def check_optimizer(optimizer: Any, config: CommunicationConfig) -> list[str]:
    """Refuses optimizers that do not go with the method; returns advice for the user, if there is any.

    Args:
        optimizer: the innermost optimizer, the one that holds `exp_avg` and the like.
    """
    kind = type(optimizer).__name__
    groups = optimizer.param_groups
    if config.method == "sparse_momentum":
        _check_adam(optimizer, kind, groups)
    momentum = max(float(group.get("momentum", 0.0)) for group in groups)
    if config.error_feedback.momentum > 0 and (momentum > 0 or is_adam(optimizer)):
        own = f"momentum {momentum:g}" if momentum else "a first moment"
        raise ConfigError(
            f"'{SECTION}.error_feedback.momentum' is {config.error_feedback.momentum:g} and the optimizer {kind} has "
            f"{own} of its own; momentum would be applied twice. What to do: use SGD with momentum 0, or leave "
            f"error_feedback.momentum out."
        )
    if config.method == "sparse_gradient" and is_adam(optimizer):
        return [
            f"method 'sparse_gradient' with {kind}: sparse gradients give Adam a wrong second moment and cost much of "
            f"the model's quality. Use method 'sparse_momentum'."
        ]
    if config.method == "sparse_gradient" and momentum > 0:
        return [
            f"method 'sparse_gradient' with momentum {momentum:g} in the optimizer: set "
            f"'{SECTION}.error_feedback.momentum' to {momentum:g} and the optimizer's to 0 (momentum correction)."
        ]
    return []


def is_adam(optimizer: Any) -> bool:
    return "adam" in type(optimizer).__name__.lower()


def _check_adam(optimizer: Any, kind: str, groups: list[dict[str, Any]]) -> None:
    def refuse(what: str, allowed: str, remedy: str) -> None:
        setting = f"'{SECTION}.method' is 'sparse_momentum' and {what}"
        raise ConfigError(f"{setting}; allowed is {allowed}. What to do: {remedy}.")

    if kind not in ("Adam", "AdamW", "FusedAdam"):
        refuse(f"the optimizer is {kind}", "Adam or AdamW", "use method 'sparse_gradient' for SGD, 'dense' for others")
    if len({tuple(group["betas"]) for group in groups}) > 1:
        refuse("parameter groups differ in betas", "the same betas in all groups", "give all groups the same betas")
    if any(group.get("amsgrad") or group.get("maximize") for group in groups):
        refuse("the optimizer has amsgrad or maximize on", "neither", "switch them off")
    decoupled = getattr(optimizer, "adam_w_mode", kind == "AdamW")
    if not decoupled and any(group["weight_decay"] for group in groups):
        refuse(
            f"{kind} adds weight decay to the gradient", "decoupled weight decay",
            "use AdamW, or set weight_decay to 0",
        )  # fmt: skip
