"""What the engine must be like. Everything that cannot be run is refused here, by name and with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import deepspeed
import torch

from ..config import SECTION, CommunicationConfig
from ..errors import ConfigError
from ..shard import Exclusion
from . import versions
from .parameters import full_numel


def check_engine(engine: Any, config: CommunicationConfig) -> None:
    """Refuses engines that level 1 cannot serve. Runs before the optimizer is built.

    Raises:
        ConfigError: names the setting as the user wrote it, its value, what is allowed and what to do.
    """
    stage = int(engine.zero_optimization_stage())
    _refuse_first(_refused_parallelism(engine, stage) + _refused_versions(versions.untested_parallelism(engine)))
    check_settings(engine._config, config)
    _refuse_first(_refused_models(engine, stage))
    _check_embeddings(engine.module)


def check_settings(settings: Any, config: CommunicationConfig) -> None:
    """Refuses what DeepSpeed's own settings make impossible; needs no engine.

    Args:
        settings: DeepSpeed's reading of the whole `ds_config.json`, a `DeepSpeedConfig`.

    Raises:
        ConfigError: as `check_engine`.
    """
    stage_3 = _refused_stage_3(settings) if settings.zero_config.stage == 3 else []
    refusals = (
        _refused_zero(settings),
        stage_3,
        _refused_precision(settings),
        _refused_sharding(settings, config),
        _refused_writers(settings),
        _refused_versions(versions.untested_settings(settings)),
    )
    _refuse_first([refusal for part in refusals for refusal in part])


Refusal = tuple[bool, str, str, str]  # wrong, the setting with its value, what is allowed, what to do


def _refuse_first(refusals: list[Refusal]) -> None:
    for wrong, setting, allowed, remedy in refusals:
        if wrong:
            raise ConfigError(f"{setting}; with '{SECTION}' allowed is {allowed}. What to do: {remedy}.")


def _refused_parallelism(engine: Any, stage: int) -> list[Refusal]:
    return [
        (
            bool(engine.pipeline_parallelism) and bool(engine.bfloat16_enabled()) and stage == 0,
            "the model is a PipelineModule in bf16 at ZeRO stage 0",
            "stage 1: at stage 0 DeepSpeed accumulates it in flat buffers of its own",
            "set 'zero_optimization.stage' to 1",
        ),
        (
            bool(engine.pipeline_parallelism) and len(set(engine.get_data_types())) > 1,
            "the model is a PipelineModule and 'data_types.grad_accum_dtype' is not its own type",
            "its own: tied weights are summed over stages in it", "remove 'data_types.grad_accum_dtype'",
        ),
        (
            bool(engine.has_moe_layers), "the model has mixture-of-experts layers",
            "a model without them: experts are reduced over groups of their own, which cross nodes",
            f"set '{SECTION}.enabled' to false",
        ),
    ]  # fmt: skip


def _refused_zero(settings: Any) -> list[Refusal]:
    zero, chosen = "'zero_optimization", settings.zero_config
    return [
        (
            versions.uses_zenflow(settings), f"{zero}.zenflow' is on", "off: it steps on gradients of its own choice",
            "remove it",
        ),
        (
            chosen.elastic_checkpoint, f"{zero}.elastic_checkpoint' is true",
            "false: it loads one file for each data-parallel rank, and here each rank of one node writes one",
            "remove it",
        ),
        (
            versions.sums_gradients(settings), "gradients are summed", "gradients that are averaged",
            "remove 'gradient_allreduce_op'",
        ),
    ]  # fmt: skip


def _refused_models(engine: Any, stage: int) -> list[Refusal]:
    return [
        (
            stage == 3 and any(hasattr(param, "ds_id") for param in engine.module.parameters()),
            "the model was built under deepspeed.zero.Init, which splits it over all ranks",
            "a model that ZeRO stage 3 splits over the ranks of one node", "build it without zero.Init",
        ),
    ]  # fmt: skip


def _refused_stage_3(settings: Any) -> list[Refusal]:
    zero, chosen = "'zero_optimization", settings.zero_config
    offload, predivide = chosen.offload_optimizer, settings.gradient_predivide_factor
    return [
        (
            offload is not None and offload.device == "nvme", f"{zero}.offload_optimizer.device' is nvme",
            "cpu: gradients on NVMe are out of reach", "set it to \"cpu\"",
        ),
        (
            getattr(offload, "super_offload", False), f"{zero}.offload_optimizer.super_offload' is true", "false",
            "remove it",
        ),
        (
            chosen.zero_hpz_partition_size > 1,
            f"{zero}.zero_hpz_partition_size' is {chosen.zero_hpz_partition_size}",
            "1: parameters do not leave the node in any case", "remove it",
        ),
        (
            predivide != 1.0, f"'gradient_predivide_factor' is {predivide} at ZeRO stage 3",
            "1.0: DeepSpeed does not take it off again where it is the number of ranks", "remove it",
        ),
        (
            chosen.zero_quantized_gradients, f"{zero}.zero_quantized_gradients' is true",
            "false: it reduces over all ranks", "remove it",
        ),
    ]  # fmt: skip


def _refused_precision(settings: Any) -> list[Refusal]:
    stage, clipping = settings.zero_config.stage, settings.gradient_clipping
    scaled_autocast = versions.autocast_dtype(settings) == torch.float16
    return [
        (
            stage == 0 and versions.fp16_enabled(settings), "'fp16.enabled' is true at ZeRO stage 0",
            "fp32 or bf16 there: DeepSpeed from 0.18.3 on steps on unscaled gradients as if they were scaled",
            "set 'zero_optimization.stage' to 1",
        ),
        (
            stage == 0 and versions.bf16_enabled(settings) and versions.spoils_bf16_at_stage_0(),
            "'bf16.enabled' is true at ZeRO stage 0", "fp32 there: DeepSpeed before 0.18.6 hands out such gradients "
            "flattened, or with a loss scale", "set 'zero_optimization.stage' to 1, or use DeepSpeed 0.18.6 or later",
        ),
        (
            scaled_autocast and stage > 0 and clipping > 0,
            f"'gradient_clipping' is {clipping} with 'torch_autocast.dtype' float16 at ZeRO stage {stage}",
            "0: ZeRO clips such gradients before their scale is taken off, to nearly nothing",
            "set 'gradient_clipping' to 0, or 'torch_autocast.dtype' to \"bfloat16\"",
        ),
    ]  # fmt: skip


def _refused_sharding(settings: Any, config: CommunicationConfig) -> list[Refusal]:
    stage = int(settings.zero_config.stage)
    setting = f"'{SECTION}.sharded_update' is {str(config.sharded_update).lower()}, ZeRO stage is {stage}"
    return [
        (
            config.sharded_update is True and stage == 0, setting, "true at stage 1, 2 or 3",
            "set 'zero_optimization.stage' to 1, or leave sharded_update out",
        ),
        (
            config.sharded_update is False and stage > 0, setting, "false at stage 0",
            "set 'zero_optimization.stage' to 0, or leave sharded_update out",
        ),
    ]  # fmt: skip


def _refused_writers(settings: Any) -> list[Refusal]:
    return [
        (
            True, f"{setting} is set", "DeepSpeed's usual writer, whose files can be completed on all ranks at once",
            "remove it",
        )
        for setting in versions.writers(settings)
    ]  # fmt: skip


def _refused_versions(untested: list[str]) -> list[Refusal]:
    version = f"on DeepSpeed {deepspeed.__version__}"
    return [(True, f"{setting} {version}", f"that on {versions.NEWEST}", "use that version") for setting in untested]


def _check_embeddings(module: torch.nn.Module) -> None:
    for name, child in module.named_modules():
        if getattr(child, "sparse", False) and isinstance(child, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            raise ConfigError(
                f"the embedding '{name}' has sparse=True; with '{SECTION}' allowed is sparse=False. What to do: build "
                f"it without sparse=True, its gradient is then compressed like any other."
            )


def check_exclusion(engine: Any, exclusion: Exclusion, config: CommunicationConfig) -> list[str]:
    """Refuses an exclusion that leaves nothing to compress; returns a warning for each pattern that finds nothing."""
    trained = {name: full_numel(param) for name, param in engine.module.named_parameters() if param.requires_grad}
    if config.method != "dense" and all(exclusion.covers(name, numel) for name, numel in trained.items()):
        raise ConfigError(
            f"'{SECTION}.exclude' is {config.exclude.model_dump()} and covers all {len(trained)} trained parameters; "
            f"allowed is an exclusion that leaves something to compress. What to do: lower exclude.min_numel (the "
            f"largest parameter has {max(trained.values(), default=0)} elements), or remove patterns."
        )
    unused = exclusion.unused(trained)
    return [f"'{SECTION}.exclude.patterns' has {pattern!r}, which finds no parameter" for pattern in unused]


@dataclass(frozen=True)
class OptimizerTraits:
    """What decides whether an optimizer goes with a method."""

    kind: str  # its class
    groups: list[dict[str, Any]]  # as `param_groups`
    decoupled: bool  # weight decay is applied to the parameters, not added to the gradient

    @property
    def is_adam(self) -> bool:
        return "adam" in self.kind.lower()


def traits_of(optimizer: Any) -> OptimizerTraits:
    """Of the innermost optimizer, the one that holds `exp_avg` and the like."""
    kind = type(optimizer).__name__
    return OptimizerTraits(kind, optimizer.param_groups, getattr(optimizer, "adam_w_mode", kind == "AdamW"))


def traits_in(settings: Any) -> OptimizerTraits | None:
    """Of the optimizer that DeepSpeed will build from its settings; None when the script brings its own."""
    kind, params = settings.optimizer_name, dict(settings.optimizer_params or {})
    if kind is None:
        return None
    if kind in ("adam", "adamw"):  # "Adam" too means AdamW to DeepSpeed, unless adam_w_mode is false
        decoupled = kind == "adamw" or bool(params.get("adam_w_mode", True))
        kind = "AdamW" if decoupled else "Adam"
        return OptimizerTraits(kind, [{"betas": (), "weight_decay": 0.0} | params], decoupled)
    return OptimizerTraits(kind, [params], False)


def check_optimizer(optimizer: OptimizerTraits, config: CommunicationConfig) -> list[str]:
    """Refuses optimizers that do not go with the method; returns advice for the user, if there is any."""
    kind, groups = optimizer.kind, optimizer.groups
    if "muon" in kind.lower():
        raise ConfigError(
            f"the optimizer is {kind}; with '{SECTION}' allowed is one that steps on the mean gradient: ZeRO puts "
            f"Muon's update in its place before nodes have exchanged it. What to do: use AdamW."
        )
    if config.method == "sparse_momentum":
        _check_adam(optimizer)
    momentum = max(float(group.get("momentum", 0.0)) for group in groups)
    if config.error_feedback.momentum > 0 and (momentum > 0 or optimizer.is_adam):
        own = f"momentum {momentum:g}" if momentum else "a first moment"
        raise ConfigError(
            f"'{SECTION}.error_feedback.momentum' is {config.error_feedback.momentum:g} and the optimizer {kind} has "
            f"{own} of its own; momentum would be applied twice. What to do: use SGD with momentum 0, or leave "
            f"error_feedback.momentum out."
        )
    if config.method == "sparse_gradient" and optimizer.is_adam:
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


def _check_adam(optimizer: OptimizerTraits) -> None:
    kind, groups = optimizer.kind, optimizer.groups

    def refuse(what: str, allowed: str, remedy: str) -> None:
        setting = f"'{SECTION}.method' is 'sparse_momentum' and {what}"
        raise ConfigError(f"{setting}; allowed is {allowed}. What to do: {remedy}.")

    if kind not in ("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam"):
        refuse(f"the optimizer is {kind}", "Adam or AdamW", "use method 'sparse_gradient' for SGD, 'dense' for others")
    if len({tuple(group["betas"]) for group in groups}) > 1:
        refuse("parameter groups differ in betas", "the same betas in all groups", "give all groups the same betas")
    if any(group.get("amsgrad") or group.get("maximize") for group in groups):
        refuse("the optimizer has amsgrad or maximize on", "neither", "switch them off")
    if not optimizer.decoupled and any(group["weight_decay"] for group in groups):
        refuse(
            f"{kind} adds weight decay to the gradient", "decoupled weight decay",
            "use AdamW, or set weight_decay to 0",
        )  # fmt: skip
