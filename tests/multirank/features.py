"""What DeepSpeed's users switch on: the rows and columns of the table in docs/features.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.engines import build_model
from tests.multirank import feature_models as models

# name -> settings. The first optimizer at hand steps on the CPU, since DeepSpeed's own is compiled for a minute first.
COLUMNS: dict[str, dict[str, Any]] = {str(stage): {"zero_optimization": {"stage": stage}} for stage in range(4)} | {
    "offload": {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
    }
}
DTYPES = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Feature:
    """A row of the table.

    Attributes:
        name: as users know it.
        settings: merged into the configuration of DeepSpeed.
        kwargs: of a model, further arguments of `initialize`.
        per_node, alike: data-parallel ranks that form a node, and which ranks hold the same parameters.
        columns, dtypes: where the row has a meaning.
        alone: leaves something behind in DeepSpeed that other rows would see.
        compiled: needs an op of DeepSpeed that is compiled for a minute when it is first used.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    model: Callable[[], torch.nn.Module] = build_model
    step: Callable[[Any, int], float] = models.managed
    kwargs: Callable[[torch.nn.Module], dict[str, Any]] = lambda model: {}
    optimizer: str = "SGD0"
    per_node: int = 2
    alike: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3),)
    columns: tuple[str, ...] = tuple(COLUMNS)
    dtypes: tuple[str, ...] = DTYPES
    alone: bool = False
    compiled: bool = False

    @property
    def peers(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that exchange with each other."""
        return self.alike if self.per_node == 1 else ((0, 2), (1, 3))


def zero(**settings: Any) -> dict[str, Any]:
    return {"zero_optimization": settings}


SLICED: dict[str, Any] = {
    "model": models.Sliced, "step": models.sliced, "per_node": 1, "alike": ((0, 2), (1, 3)), "alone": True,
}  # fmt: skip
PIPED: dict[str, Any] = {"step": models.piped, "per_node": 1, "alike": ((0, 1), (2, 3)), "alone": True}

FEATURES = [
    Feature("plain"),
    Feature("AdamW", optimizer="AdamW"),
    Feature("`gradient_accumulation_steps`", {"gradient_accumulation_steps": 3}),
    Feature("`gradient_clipping`", {"gradient_clipping": 0.2}),
    Feature("`managed_gradient_accumulation: false`", {"managed_gradient_accumulation": False}, step=models.unmanaged),
    Feature("`no_sync()`", step=models.no_sync),
    Feature("`coalesce_grad_reduction()`", step=models.coalesced),
    Feature("`set_gradient_accumulation_boundary()`", step=models.own_boundary),
    Feature("a gradient that is not finite on one rank", step=models.poisoned),
    Feature("dynamic loss scale", {"fp16": {"initial_scale_power": 18, "loss_scale_window": 3, "hysteresis": 1}},
            dtypes=("fp16",)),
    Feature("`communication_data_type: fp32`", {"communication_data_type": "fp32"}),
    Feature("`communication_data_type: bf16`", {"communication_data_type": "bf16"}),
    Feature("`data_types.grad_accum_dtype: fp32`", {
        "data_types": {"grad_accum_dtype": "fp32"}, "gradient_accumulation_steps": 3}),
    Feature("`torch_autocast` in bfloat16", {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, alone=True),
    Feature("`torch_autocast` in float16", {
        "torch_autocast": {"enabled": True, "dtype": "float16"}}, alone=True),
    Feature("`torch_autocast` in float16, a gradient that is not finite", {
        "torch_autocast": {"enabled": True, "dtype": "float16"}}, step=models.poisoned, alone=True, dtypes=("fp32",)),
    Feature("`torch_autocast` in float16, `gradient_clipping`", {
        "torch_autocast": {"enabled": True, "dtype": "float16"}, "gradient_clipping": 0.2}, alone=True,
            dtypes=("fp32",)),
    Feature("`bf16_master_weights_and_grads`, `bf16_optimizer_states`", {
        "bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}, dtypes=("bf16",)),
    Feature("`bf16.check_grad_overflow: false`", {"bf16": {"check_grad_overflow": False}}, dtypes=("bf16",)),
    Feature("frozen parameters", model=models.Frozen),
    Feature("parameters that get no gradient", model=models.Unused),
    Feature("tied weights", model=models.Tied),
    Feature("parameter groups that differ", kwargs=lambda model: {"model_parameters": models.two_groups(model)}),
    Feature("activation checkpointing", model=lambda: models.Checkpointed(False)),
    Feature("activation checkpointing, reentrant", model=lambda: models.Checkpointed(True)),
    Feature("lr scheduler", {"scheduler": {"type": "WarmupLR", "params": {
        "warmup_min_lr": 0.01, "warmup_max_lr": 0.1, "warmup_num_steps": 3}}}),
    Feature("`overlap_comm`", zero(overlap_comm=True)),
    Feature("`contiguous_gradients: false`", zero(contiguous_gradients=False)),
    Feature("`round_robin_gradients`", zero(round_robin_gradients=True)),
    Feature("`reduce_scatter: false`", zero(reduce_scatter=False)),
    Feature("`use_multi_rank_bucket_allreduce: false`", zero(use_multi_rank_bucket_allreduce=False)),
    Feature("`parameter_alignment`", zero(parameter_alignment=True)),
    Feature("`compute_grad_norm: false`", zero(compute_grad_norm=False) | {"gradient_clipping": 0.0}),
    Feature("`prescale_gradients`", {"prescale_gradients": True} | zero(reduce_scatter=False)),
    Feature("`gradient_predivide_factor`", {"gradient_predivide_factor": 2.0} | zero(reduce_scatter=False)),
    Feature("`gradient_allreduce_op: sum`", {"gradient_allreduce_op": "sum"}),
    Feature("`elastic_checkpoint`", zero(elastic_checkpoint=True)),
    Feature("`offload_optimizer` at stage 1", zero(stage=1), columns=("offload",)),
    Feature("`offload_optimizer` at stage 3", zero(stage=3), columns=("offload",)),
    Feature("`offload_optimizer`, AdamW, accumulation and clipping", {
        "gradient_accumulation_steps": 3, "gradient_clipping": 0.2}, optimizer="AdamW", columns=("offload",)),
    Feature("`offload_optimizer`, DeepSpeedCPUAdam", {
        "optimizer": {"type": "AdamW", "params": {"torch_adam": False}}, "zero_force_ds_cpu_optimizer": True},
        optimizer="AdamW", columns=("offload",), compiled=True),
    Feature("`offload_optimizer`, `bf16_master_weights_and_grads`", {
        "optimizer": {"type": "AdamW", "params": {"torch_adam": False}}, "zero_force_ds_cpu_optimizer": True,
        "bf16": {"bf16_master_weights_and_grads": True}}, optimizer="AdamW", columns=("offload",), dtypes=("bf16",),
        compiled=True),
    Feature("`offload_param`", zero(offload_param={"device": "cpu"}), columns=("3",)),
    Feature("`zenflow`", zero(zenflow={"topk_ratio": 0.1, "update_interval": 2, "full_warm_up_rounds": 0}),
            columns=("offload",)),
    Feature("sequence parallelism (Ulysses)", kwargs=models.sequence_parallel, alone=True),
    Feature("tensor parallelism (AutoTP)", models.AUTO_TP, **SLICED),
    Feature("tensor parallelism (AutoTP), `gradient_clipping`", models.AUTO_TP | {"gradient_clipping": 0.2}, **SLICED),
    Feature("pipeline (`PipelineModule`)", {"gradient_accumulation_steps": 2}, model=lambda: models.pipeline(False),
            **PIPED),
    Feature("pipeline with tied weights, `gradient_clipping`", {
        "gradient_accumulation_steps": 2, "gradient_clipping": 0.1}, model=lambda: models.pipeline(True), **PIPED),
    Feature("mixture of experts", model=models.Experts, kwargs=models.expert_groups, alone=True),
    Feature("Muon", {"optimizer": {"type": "Muon", "params": {"lr": 0.02}}}, dtypes=("fp32",)),
    Feature("embeddings with `sparse=True`", model=models.SparseTable),
]  # fmt: skip
