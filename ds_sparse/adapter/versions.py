"""What differs between versions of DeepSpeed, and the names of it that the adapter joins.

DeepSpeed promises none of these names, so all of them are looked for before an engine is changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.checkpoint import constants as checkpoint_constants
from deepspeed.runtime import constants

# The oldest and the newest version that `make test-versions` runs the tests on, as in `install_requires`.
OLDEST, NEWEST = "0.16.9", "0.19.8"

# Of the engine. There from before the optimizer is built, some as None.
ENGINE = (
    "_config", "_copy_recovery_script", "_do_optimizer_sanity_check", "_get_all_zero_checkpoint_state_dicts",
    "_get_ckpt_name", "_load_zero_checkpoint", "_reduce_non_expert_gradients", "_take_model_step", "backward",
    "basic_optimizer", "bfloat16_enabled", "checkpoint_engine", "device", "get_data_types", "global_rank",
    "global_samples", "global_steps", "gradient_accumulation_steps", "gradient_clipping", "has_moe_layers",
    "load_checkpoint", "load_universal_checkpoint", "loaded_checkpoint_dp_world_size", "module", "monitor",
    "mp_world_size", "mpu", "optimizer", "param_names", "pipeline_parallelism", "save_checkpoint",
    "seq_data_parallel_group", "seq_dp_world_size", "sequence_parallel_size", "skipped_steps",
    "step", "use_node_local_storage", "zero_optimization_stage",
)  # fmt: skip
# Of the optimizer of ZeRO stage 1 and 2, and of stage 3.
ZERO = (
    "averaged_gradients", "bit16_groups", "clip_grad", "communication_data_type", "cpu_offload", "dp_process_group",
    "get_param_id", "grad_partition_insertion_offset", "grad_start_offset", "groups_padding", "loss_scale",
    "overflow", "params_in_partition", "partition_size", "real_dp_process_group",
    "single_partition_of_fp32_groups", "step",
)  # fmt: skip
ZERO_3 = (
    "averaged_gradients", "clip_grad", "communication_data_type", "dp_process_group", "fp16_groups",
    "fp32_partitioned_groups_flat", "get_param_id", "loss_scale", "offload_optimizer", "overflow", "step",
)  # fmt: skip
OFFLOADED = ("norm_for_param_grads",)  # of both, with the optimizer on the CPU

# A key of ZeRO's state in checkpoints. Versions before 0.19 neither write nor read it.
PARAM_ALIGNMENT_PADDINGS = getattr(checkpoint_constants, "PARAM_ALIGNMENT_PADDINGS", "param_alignment_paddings")


def require(owner: Any, names: Iterable[str]) -> None:
    """Looks for what the adapter needs of an object, or a class, of DeepSpeed.

    Raises:
        RuntimeError: names the version, what it lacks and the versions that have it.
    """
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        kind = owner if isinstance(owner, type) else type(owner)
        raise RuntimeError(
            f"DeepSpeed {deepspeed.__version__} has no {', '.join(missing)} in {kind.__name__}, which compressed "
            f"communication needs. What to do: use a version from {OLDEST} to {NEWEST}, with which it was tested."
        )


def notes(engine: Any) -> list[str]:
    """Warnings of a version outside of the tested range, and of one that trains wrongly whatever we do."""
    installed = _number(deepspeed.__version__)
    if not _number(OLDEST) <= installed <= _number(NEWEST):
        return [
            f"DeepSpeed {deepspeed.__version__} is outside of the range that compressed communication was tested with, "
            f"{OLDEST} to {NEWEST}"
        ]
    # `independent_gradient_partition_epilogue` overwrites the sum of the earlier micro batches.
    accumulates = engine.zero_optimization_stage() == 2 and engine.gradient_accumulation_steps() > 1
    if accumulates and (0, 17, 6) <= installed <= (0, 18, 2):
        return [
            f"DeepSpeed {deepspeed.__version__} at ZeRO stage 2 steps on the last of "
            f"{engine.gradient_accumulation_steps()} micro batches alone, also without compressed communication. Use "
            f"stage 1, or another version."
        ]
    return []


def _number(version: str) -> tuple[int, ...]:
    """The leading numbers: (0, 19, 8) of "0.19.8+cpu"."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def no_graph() -> Any:
    """A context to build the optimizer in.

    0.18.9 flattens ZeRO's parameters with their autograd graph, unless memory is short, and then fails at the first
    step: "Output 0 of Split is a view" (DeepSpeed PR 7948).
    """
    return torch.no_grad()


@contextmanager
def finds_overflow(zero: Any) -> Iterator[None]:
    """Lets ZeRO find, in one step, the overflow that its gradients hold, also where its precision is not checked.

    Newer versions look when `check_grad_overflow` is set; older ones, where they do not look, believe `overflow`, and
    would believe it at all later steps.
    """
    checked, zero.overflow = getattr(zero, "check_grad_overflow", True), True
    zero.check_grad_overflow = True
    try:
        yield
    finally:
        zero.check_grad_overflow = checked


def spoils_bf16_at_stage_0() -> bool:
    """Whether bf16 at ZeRO stage 0 is stepped with a loss scale, or on gradients flattened beforehand.

    Up to 0.16.9 gradients arrive as one flat fp32 buffer with padding; from 0.17.0 to 0.18.5 a loss scale is involved,
    in parts by mistake (DeepSpeed PR 7839).
    """
    return _number(deepspeed.__version__) < (0, 18, 6)


def untested_settings(settings: Any) -> list[str]:
    """What is asked for that was tested on the newest version alone, where this one is older; as users write it."""
    chosen, autocast = settings.zero_config, autocast_enabled(settings)
    offload = chosen.offload_optimizer
    mixed = bf16_enabled(settings) and settings.grad_accum_dtype in ("fp32", "float32")
    return _where_older({
        "'zero_optimization.stage' is 3": chosen.stage == 3,
        "'zero_optimization.offload_optimizer' is on": offload is not None and offload.device != "none",
        "'torch_autocast.enabled' is true at ZeRO stage 0": chosen.stage == 0 and autocast,
        "'torch_autocast.dtype' is float16": autocast_dtype(settings) == torch.float16,
        "'data_types.grad_accum_dtype' is fp32 with bf16 at ZeRO stage 1": chosen.stage == 1 and mixed,
    })  # fmt: skip


def untested_parallelism(engine: Any) -> list[str]:
    """As `untested_settings`, of what the engine knows."""
    sequence = int(engine.sequence_parallel_size)
    return _where_older({
        "the model is a PipelineModule": bool(engine.pipeline_parallelism),
        f"sequence parallelism is {sequence}": sequence > 1,
    })  # fmt: skip


def _where_older(asked: dict[str, bool]) -> list[str]:
    older = _number(deepspeed.__version__) < _number(NEWEST)
    return [setting for setting, is_asked in asked.items() if is_asked and older]


def fp16_enabled(settings: Any) -> bool:
    """Of DeepSpeed's settings; before 0.17 there were flags in place of sections."""
    return bool(settings.float16_config.enabled if hasattr(settings, "float16_config") else settings.fp16_enabled)


def bf16_enabled(settings: Any) -> bool:
    """As `fp16_enabled`."""
    return bool(settings.bfloat16_config.enabled if hasattr(settings, "bfloat16_config") else settings.bfloat16_enabled)


def autocast_enabled(settings: Any) -> bool:
    """Versions before 0.17 do not know it."""
    return bool(getattr(settings, "torch_autocast_enabled", False))


def autocast_dtype(settings: Any) -> torch.dtype | None:
    """Of the `torch_autocast` section, where it is on and names one."""
    return settings.torch_autocast_dtype if autocast_enabled(settings) else None


def autocast_scale(owner: Any) -> float:
    """The scale of torch autocast in float16, which an engine keeps at stage 0 and ZeRO's optimizer at the others."""
    for name in ("torch_autocast_gradscaler", "torch_autocast_z0_gradscaler"):
        scaler = getattr(owner, name, None)
        if scaler is not None:
            return float(scaler.get_scale())
    return 1.0


def uses_zenflow(settings: Any) -> bool:
    """Whether ZenFlow is on. Versions before 0.17 do not know it."""
    return getattr(settings.zero_config, "zenflow", None) is not None


def sums_gradients(settings: Any) -> bool:
    """Whether gradients are summed, not averaged, which older versions cannot do."""
    asked = getattr(settings, "gradient_allreduce_op", None)
    return asked is not None and asked == constants.GRADIENT_ALLREDUCE_OP_SUM


def writers(settings: Any) -> list[str]:
    """The settings that replace the usual writer of checkpoints, as far as this version knows them."""
    known = getattr(settings, "checkpoint_config", {})
    found = ["'checkpoint.writer'"] if "writer" in known and known["writer"] is not None else []
    datastates = getattr(settings, "datastates_config", None)
    return found + (["'datastates_ckpt'"] if datastates is not None and datastates.enabled else [])


def model_parallel_rank(engine: Any) -> int:
    """That in the names of checkpoint files."""
    if hasattr(engine, "checkpoint_mp_rank"):
        return int(engine.checkpoint_mp_rank)
    return 0 if engine.mpu is None else int(engine.mpu.get_model_parallel_rank())
