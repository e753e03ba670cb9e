"""ZeRO's partitions, cut anew for another number of ranks.

DeepSpeed loads the partitions of stage 1 and 2 only into as many ranks as wrote them; its elastic checkpoints merge
them for any number, but have to be asked for when they are written, and know Adam's state alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    GROUP_PADDINGS,
    SINGLE_PARTITION_OF_FP32_GROUPS,
)

from ..errors import CheckpointError
from . import versions
from .adam import Placement

State = dict[str, Any]


@dataclass(frozen=True)
class _Copy:
    """Entries of a saved partition, and where they belong in this rank's. All numbers are elements."""

    group: int
    numel: int
    source: int
    target: int


class Partition:
    """This rank's partition of every parameter group, filled from saved ones whatever their number.

    Saved partitions are equal parts of a flat group: its parameters one after the other, each followed by padding
    that aligns the next. An entry is found by its parameter's name and its place in it, so order, padding and number
    of partitions may all differ. Parameters, and whatever of the optimizer's state has the size of a partition, are
    copied bit for bit; the rest (step counts, hyperparameters, the loss scale) is the same in all partitions and taken
    from the first.

    Args:
        zero: the ZeRO optimizer.
        placement: of this rank's segments in its masters.
        shapes: of the parameters as saved: for each group by name, in the order of the flat group.
    """

    def __init__(self, zero: Any, placement: Placement, shapes: Sequence[Mapping[str, torch.Size]]) -> None:
        self._zero, self._placement, self._shapes = zero, placement, shapes
        self._masters: list[torch.Tensor] = zero.single_partition_of_fp32_groups
        self._offsets: dict[str, int] = {}
        self._filled = 0
        self._state: State = {}

    def fill(self, saved: Iterable[State]) -> State:
        """A state for the optimizer's `load_state_dict`, from those of all saved partitions in order.

        Raises:
            CheckpointError: they are elastic, or do not hold all parameters of this run.
        """
        for index, state in enumerate(saved):
            if not isinstance(state[BASE_OPTIMIZER_STATE], dict):
                raise CheckpointError(
                    "the checkpoint was written with 'zero_optimization.elastic_checkpoint'; allowed for another "
                    "number of ranks is one without. What to do: load it on as many ranks as wrote it, and save again."
                )
            if index == 0:
                self._begin(state)
            for copy in self._copies(state, index):
                self._take(state, copy)
        if self._filled != self._placement.layout.numel:
            raise CheckpointError(
                f"the checkpoint holds {self._filled} of the {self._placement.layout.numel} entries that this rank "
                f"needs. What to do: build the model and the parameter groups that were saved."
            )
        return self._state

    def _begin(self, first: State) -> None:
        """Room for everything, and what all partitions have in common."""
        paddings = first.get(versions.PARAM_ALIGNMENT_PADDINGS) or [[0] * len(shapes) for shapes in self._shapes]
        for shapes, group_paddings in zip(self._shapes, paddings, strict=True):
            offset = 0
            for (name, shape), padding in zip(shapes.items(), group_paddings, strict=True):
                self._offsets[name] = offset
                offset += shape.numel() + padding
        base = first[BASE_OPTIMIZER_STATE]
        moments = {
            group: {key: self._room(first, group, value) for key, value in moments.items()}
            for group, moments in base["state"].items()
        }
        self._state = first | {
            BASE_OPTIMIZER_STATE: base | {"state": moments},
            SINGLE_PARTITION_OF_FP32_GROUPS: [torch.zeros_like(master, device="cpu") for master in self._masters],
            GROUP_PADDINGS: self._zero.groups_padding,
            versions.PARAM_ALIGNMENT_PADDINGS: getattr(self._zero, "round_robin_bit16_padding", None),
        }

    def _room(self, saved: State, group: int, value: Any) -> Any:
        if not _is_partition(saved, group, value):
            return value
        return torch.zeros(self._masters[group].numel(), dtype=value.dtype)

    def _copies(self, saved: State, index: int) -> Iterable[_Copy]:
        groups = {id(master): group for group, master in enumerate(self._masters)}
        for segment, place in zip(self._placement.layout.segments, self._placement.places, strict=True):
            if segment.name not in self._offsets:
                continue
            group = groups[id(place.param)]
            size = _partition_size(saved, group)
            begin = self._offsets[segment.name] + segment.offset  # in the flat group
            first, last = max(begin, index * size), min(begin + segment.numel, (index + 1) * size)
            if first < last:
                yield _Copy(group, last - first, first - index * size, place.start + first - begin)

    def _take(self, saved: State, copy: _Copy) -> None:
        def take(tensors: Callable[[State], torch.Tensor]) -> None:
            source = tensors(saved)[copy.source : copy.source + copy.numel]
            tensors(self._state)[copy.target : copy.target + copy.numel] = source

        take(lambda state: state[SINGLE_PARTITION_OF_FP32_GROUPS][copy.group])
        for key, value in saved[BASE_OPTIMIZER_STATE]["state"].get(copy.group, {}).items():
            if _is_partition(saved, copy.group, value):
                take(lambda state, key=key: state[BASE_OPTIMIZER_STATE]["state"][copy.group][key])  # type: ignore[misc]
        self._filled += copy.numel


def _partition_size(saved: State, group: int) -> int:
    """With the padding at the end, which parameters are saved without."""
    return int(saved[SINGLE_PARTITION_OF_FP32_GROUPS][group].numel() + saved[GROUP_PADDINGS][group])


def _is_partition(saved: State, group: int, value: Any) -> bool:
    return torch.is_tensor(value) and value.dim() == 1 and value.numel() == _partition_size(saved, group)
