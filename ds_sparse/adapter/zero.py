"""Level 1 at ZeRO stage 1, 2 and 3: ZeRO's own optimizer, built over the ranks of one node.

ZeRO reduces gradients into this rank's partition inside the node, and gathers parameters inside the node. In between,
at `optimizer.step()`, the partition is exchanged with the ranks that own the same one on the other nodes.
"""

from __future__ import annotations

from typing import Any

import torch

from ..level2 import Level2
from ..optim.step import replace_step
from ..shard import ShardLayout
from . import versions
from .adam import Placement
from .parameters import Parameters, full_numel
from .partition import partition_of


class ZeroRoute:
    """Takes the shard out of ZeRO's gradients and puts the exchanged one back.

    Args:
        engine: whose `optimizer` is a ZeRO optimizer over the node's group.
    """

    def __init__(self, engine: Any, parameters: Parameters) -> None:
        self._engine, self._optimizer = engine, engine.optimizer
        self._stage, names = int(engine.zero_optimization_stage()), engine.param_names
        versions.require(self._optimizer, versions.ZERO_3 if self._stage == 3 else versions.ZERO)
        self._partition = partition_of(self._optimizer, self._stage)
        owned = self._partition.owned
        groups = self._optimizer.fp16_groups if self._stage == 3 else self._optimizer.bit16_groups
        self._params = [param for group in groups for param in group]
        self.layout = ShardLayout(
            parameters.segment(names[param], param, place.numel, offset) for param, offset, place in owned
        )
        self.placement = Placement(
            self.layout,
            places=[place for *_, place in owned],
            stepped=[(names[param], place) for param, _, place in owned],
            names=[names[param] for param in self._params],
            device=engine.device,  # not that of the masters, which may be offloaded
        )

    def install(self, level2: Level2) -> None:
        """Puts level 2 in front of ZeRO's step."""
        self._level2 = level2
        self._zero_step = replace_step(self._optimizer, self._step)

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        zero, scale = self._optimizer, self._loss_scale()
        # 1. This rank's shard, without the loss scale.
        shard = torch.empty(self.layout.numel, device=self.placement.device)
        self.layout.flatten_(shard, self._partition.read()).div_(scale)
        # 2. Level 2.
        self._count_level1_bytes()
        outcome = self._level2.exchange_(shard)
        if not outcome.finite:
            return self._skip(*args, **kwargs)
        # 3. Back, in fp32, with the loss scale that ZeRO will take off again.
        zero.overflow = False  # versions before 0.19 remember that of the last step where they do not check
        self._partition.write(self.layout.views(shard.mul_(scale)))
        if outcome.grad_norm is None:
            return self._zero_step(*args, **kwargs)
        # 4. Clipped before the exchange, so not again here.
        clip_norm, zero.clip_grad = zero.clip_grad, 0.0
        try:
            return self._zero_step(*args, **kwargs)
        finally:
            zero.clip_grad, zero._global_grad_norm = clip_norm, outcome.grad_norm

    def _loss_scale(self) -> float:
        """What the gradients are multiplied by: fp16's own scale, or that of torch autocast in float16."""
        return float(self._optimizer.loss_scale) * versions.autocast_scale(self._optimizer)

    def _skip(self, *args: Any, **kwargs: Any) -> Any:
        """Has ZeRO skip this step on every rank, as it does for an overflow of its own."""
        zero = self._optimizer
        self._partition.spoil()
        with versions.finds_overflow(zero):
            return self._zero_step(*args, **kwargs)

    def _count_level1_bytes(self) -> None:
        """Bytes that ZeRO sends inside the node for one optimizer step, by formula: DeepSpeed sends them, not we.

        Gradients are all-reduced (ZeRO's `reduce_scatter` does that too) at stage 1 and 2, and reduced into the
        partitions at stage 3; once a step at stage 1, once a micro batch at the others. Parameters are all-gathered:
        once a step, at stage 3 for each forward and each backward.
        """
        zero = self._optimizer
        n = torch.distributed.get_world_size(zero.dp_process_group)
        numel = sum(map(full_numel, self._params))
        micro_batches = self._engine.gradient_accumulation_steps()
        reductions = {1: 2, 2: 2 * micro_batches, 3: micro_batches}[self._stage]
        gathers = 2 * micro_batches if self._stage == 3 else 1
        sent = reductions * zero.communication_data_type.itemsize + gathers * self._params[0].element_size()
        self._level2.stats.count_bytes("intra", (n - 1) * numel * sent // n)
