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

# The oldest and the newest version that `make test-versions` runs the tests on, as in `install_requires`.
OLDEST, NEWEST = "0.16.9", "0.19.8"

# Of the engine. There from before the optimizer is built, some as None.
ENGINE = (
    "_config", "_reduce_non_expert_gradients", "basic_optimizer", "bfloat16_enabled", "fp16_enabled",
    "get_data_types", "global_rank", "global_samples", "global_steps", "gradient_accumulation_steps",
    "gradient_average", "gradient_clipping", "has_moe_layers", "load_checkpoint", "module", "monitor", "mpu",
    "optimizer", "param_names", "pipeline_parallelism", "save_checkpoint", "seq_data_parallel_group",
    "sequence_parallel_size", "skipped_steps", "step", "zero_elastic_checkpoint", "zero_offload_optimizer",
    "zero_optimization_stage",
)  # fmt: skip
# Of the optimizer of ZeRO stage 1 and 2.
ZERO = (
    "averaged_gradients", "bit16_groups", "bit16_groups_flat", "clip_grad", "communication_data_type",
    "dp_process_group", "get_param_id", "grad_partition_insertion_offset", "grad_start_offset", "loss_scale",
    "overflow", "params_in_partition", "partition_gradients", "partition_size", "real_dp_process_group",
    "single_partition_of_fp32_groups", "step",
)  # fmt: skip


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
    checked, zero.overflow = getattr(zero, "check_grad_overflow", False), True
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


def autocast_dtype(engine: Any) -> torch.dtype | None:
    """Of the `torch_autocast` section where it is on. Versions before 0.17 do not know it."""
    on = hasattr(engine, "torch_autocast_enabled") and engine.torch_autocast_enabled()
    return engine.torch_autocast_dtype() if on else None


def uses_zenflow(engine: Any) -> bool:
    """Whether ZenFlow is on. Versions before 0.17 do not know it."""
    return bool(getattr(engine, "zenflow", False))
