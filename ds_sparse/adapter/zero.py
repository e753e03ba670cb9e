"""Level 1 at ZeRO stage 1 and 2: ZeRO's own optimizer, built over the ranks of one node.

ZeRO reduces gradients into this rank's partition inside the node, and gathers updated parameters inside the node. In
between, at `optimizer.step()`, the partition is exchanged with the ranks that own the same one on the other nodes.
"""

from __future__ import annotations

from typing import Any

import torch

from ..level2 import Level2
from ..optim.step import replace_step
from ..optim.two_phase_adam import Place
from ..shard import Exclusion, Segment, ShardLayout
from . import versions
from .adam import Placement


class ZeroRoute:
    """Takes the shard out of ZeRO's averaged gradients and puts the exchanged one back.

    Args:
        engine: whose `optimizer` is a ZeRO stage 1 or 2 optimizer over the node's group.
    """

    def __init__(self, engine: Any, exclusion: Exclusion) -> None:
        versions.require(engine.optimizer, versions.ZERO)
        self._optimizer, self._names = engine.optimizer, engine.param_names
        self._engine = engine
        owned = [pair for group in range(len(self._optimizer.bit16_groups)) for pair in self._owned(group)]
        self.layout = ShardLayout(
            Segment(self._names[param], place.numel, exclusion.covers(self._names[param], param.numel()))
            for param, place in owned
        )
        self.placement = Placement(
            self.layout,
            places=[place for _, place in owned],
            stepped=[(self._names[param], place) for param, place in owned],
            names=[self._names[param] for group in self._optimizer.bit16_groups for param in group],
            device=self._optimizer.single_partition_of_fp32_groups[0].device,
        )

    def _owned(self, group: int) -> list[tuple[torch.nn.Parameter, Place]]:
        """The parameters, or parts, of a parameter group that this rank owns, in ZeRO's order."""
        zero = self._optimizer
        master = zero.single_partition_of_fp32_groups[group]
        partition = torch.distributed.get_rank(zero.real_dp_process_group[group])
        owned = []
        for param in zero.params_in_partition[group]:
            key = zero.get_param_id(param)
            start = int(zero.grad_start_offset[group][partition][key])
            place = int(zero.grad_partition_insertion_offset[group][partition][key])
            numel = int(min(param.numel() - start, zero.partition_size[group] - place))
            owned.append((param, Place(master, place, numel)))
        return owned

    def install(self, level2: Level2) -> None:
        """Puts level 2 in front of ZeRO's step."""
        self._level2 = level2
        self._zero_step = replace_step(self._optimizer, self._step)

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        zero = self._optimizer
        # 1. This rank's shard, without the loss scale.
        shard = torch.empty(self.layout.numel, device=self.placement.device)
        self.layout.flatten_(shard, self._gradients()).div_(zero.loss_scale)
        # 2. Level 2.
        self._count_level1_bytes()
        outcome = self._level2.exchange_(shard)
        if not outcome.finite:
            return self._skip(*args, **kwargs)
        # 3. Back, in fp32, with the loss scale that ZeRO will take off again.
        zero.overflow = False  # versions before 0.19 remember that of the last step where they do not check
        self._put_back(shard.mul_(zero.loss_scale))
        if outcome.grad_norm is None:
            return self._zero_step(*args, **kwargs)
        # 4. Clipped before the exchange, so not again here.
        clip_norm, zero.clip_grad = zero.clip_grad, 0.0
        try:
            return self._zero_step(*args, **kwargs)
        finally:
            zero.clip_grad, zero._global_grad_norm = clip_norm, outcome.grad_norm

    def _gradients(self) -> list[torch.Tensor]:
        """ZeRO's averaged gradients in the order of `layout.segments`, without its padding."""
        gradients = []
        for group, params in enumerate(self._optimizer.params_in_partition):
            entries = [entry for entry in self._optimizer.averaged_gradients[group] if not _is_padding(entry)]
            gradients += entries[: len(params)]  # what follows the last parameter is padding, marked or not
        return gradients

    def _put_back(self, shard: torch.Tensor) -> None:
        views = self.layout.views(shard)
        for group, params in enumerate(self._optimizer.params_in_partition):
            entries: list[torch.Tensor] = []
            left = len(params)
            for entry in self._optimizer.averaged_gradients[group]:
                if left and not _is_padding(entry):
                    entries.append(next(views).view(entry.shape))
                    left -= 1
                else:
                    padding = torch.zeros_like(entry, dtype=shard.dtype)
                    padding._zero_padding = True  # type: ignore[attr-defined]  # ZeRO's norm leaves marked entries out
                    entries.append(padding)
            self._optimizer.averaged_gradients[group] = entries

    def _skip(self, *args: Any, **kwargs: Any) -> Any:
        """Has ZeRO skip this step on every rank, as it does for an overflow of its own."""
        zero = self._optimizer
        for entries in zero.averaged_gradients.values():
            entries[0].fill_(float("inf"))
        with versions.finds_overflow(zero):
            return self._zero_step(*args, **kwargs)

    def _count_level1_bytes(self) -> None:
        """Bytes that ZeRO sends inside the node for one optimizer step, by formula: DeepSpeed sends them, not we.

        Gradients are all-reduced (ZeRO's `reduce_scatter` does that too), once a step at stage 1 and once a micro
        batch at stage 2; parameters are all-gathered.
        """
        zero = self._optimizer
        n = torch.distributed.get_world_size(zero.dp_process_group)
        numel = sum(int(flat.numel()) for flat in zero.bit16_groups_flat)
        element = zero.bit16_groups_flat[0].element_size()
        rounds = self._engine.gradient_accumulation_steps() if zero.partition_gradients else 1
        gradient_bytes = 2 * (n - 1) * numel * zero.communication_data_type.itemsize * rounds // n
        self._level2.stats.count_bytes("intra", gradient_bytes + (n - 1) * numel * element // n)


def _is_padding(entry: torch.Tensor) -> bool:
    return getattr(entry, "_zero_padding", False)
