"""Level 1 at ZeRO stage 0, done here: reduce-scatter in the node, level 2, all-gather in the node.

HiTopKComm (Shi et al. 2021, Algorithm 2) step by step, at the place where DeepSpeed would all-reduce the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..config import SECTION
from ..level2 import Level2, Outcome
from ..links import Link
from ..optim.step import replace_step
from ..optim.two_phase_adam import Place
from ..shard import Segment, ShardLayout
from . import versions
from .adam import Placement
from .parameters import Parameters


class Stage0Route:
    """Replaces the engine's gradient reduction.

    The flat gradient holds compressed parameters first and excluded ones last; rank j of a node owns the j-th of n
    equal parts of it.

    Args:
        engine: at stage 0.
        node: link to the ranks of this node.
    """

    def __init__(self, engine: Any, parameters: Parameters, node: Link) -> None:
        self._engine, self._node = engine, node
        named = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad and p.numel()]
        dense = [parameters.sent_dense(name, param) for name, param in named]
        self._order = sorted(range(len(named)), key=lambda i: dense[i])  # stable: False before True
        self._numel = sum(param.numel() for _, param in named)
        part = -(-self._numel // node.size)
        first, last = node.rank * part, min((node.rank + 1) * part, self._numel)
        masters = _master_places(engine.optimizer)
        stepped = [masters.get(param, Place(param, 0, param.numel())) for _, param in named]
        segments: list[Segment] = []
        places: list[Place] = []
        offset = 0
        for i in self._order:
            name, param = named[i]
            start, stop = max(first, offset), min(last, offset + param.numel())
            if start < stop:
                segments.append(parameters.segment(name, param, stop - start, start - offset))
                places.append(Place(stepped[i].param, stepped[i].start + start - offset, stop - start))
            offset += param.numel()
        self.layout = ShardLayout(segments)
        self.placement = Placement(
            self.layout,
            places,
            stepped=[(name, place) for (name, _), place in zip(named, stepped, strict=True)],
            names=[name for name, _ in named],
            device=named[0][1].device,
        )
        self._sizes = [param.numel() for _, param in named]
        self._padded = part * node.size

    def install(self, level2: Level2) -> None:
        """Takes the place of the engine's reduction and guards the optimizer's step."""
        self._level2 = level2
        self._engine._reduce_non_expert_gradients = self._reduce
        self._optimizer_step = replace_step(self._engine.optimizer, self._step)
        self._outcome = Outcome(finite=True)

    def _reduce(self, grads: Sequence[torch.Tensor], elements_per_buffer: int) -> None:
        """Replaces the gradients, in the order of the module's parameters, by what the optimizer shall see."""
        if [grad.numel() for grad in grads] != self._sizes:
            raise RuntimeError(
                f"'{SECTION}' was set up for {len(self._sizes)} trained parameters and got {len(grads)} gradients, or "
                f"of other sizes: freezing or thawing parameters later does not work at ZeRO stage 0. Use stage 1."
            )
        ordered = [grads[i] for i in self._order]
        # 1. Reduce-scatter the mean in the node.
        flat = torch.zeros(self._padded, device=self.placement.device)
        torch.cat([grad.reshape(-1).to(flat.dtype) for grad in ordered], out=flat[: self._numel])
        scale = self._loss_scale()
        part = self._node.sum_scatter(flat).div_(scale * self._node.size / self._engine.sequence_parallel_size)
        # 2. and 3. Level 2 on this rank's part, without the padding of the last one.
        self._outcome = self._level2.exchange_(part[: self.layout.numel])
        self._engine.optimizer.overflow = not self._outcome.finite  # the engine counts skipped steps by it
        self._clip_elsewhere(self._outcome.grad_norm is not None)
        if not self._outcome.finite:
            for grad in grads:  # on all ranks, so that torch's loss scale falls on all of them
                grad.fill_(float("inf"))
            return
        # 4. All-gather in the node.
        offset, flat = 0, self._node.gather(part.mul_(scale)).view(-1)
        for grad in ordered:
            grad.copy_(flat[offset : offset + grad.numel()].view_as(grad))
            offset += grad.numel()

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's step, or none of it when some rank's gradient was not finite."""
        if not self._outcome.finite:
            return None
        result = self._optimizer_step(*args, **kwargs)
        if self._outcome.grad_norm is not None:
            self._engine.optimizer._global_grad_norm = self._outcome.grad_norm
        self._clip_elsewhere(False)
        return result

    def _loss_scale(self) -> float:
        """What the gradients are multiplied by: 1, but for torch autocast in float16."""
        return versions.autocast_scale(self._engine)

    def _clip_elsewhere(self, clipped: bool) -> None:
        """Switches DeepSpeed's own clipping off for this step, when level 2 has clipped, and on again after it."""
        clip_norm = 0.0 if clipped else self._level2.clip_norm
        self._engine.gradient_clipping = lambda: clip_norm
        if hasattr(self._engine.optimizer, "clip_grad"):
            self._engine.optimizer.clip_grad = clip_norm


def _master_places(optimizer: Any) -> dict[torch.Tensor, Place]:
    """Model parameter -> where the optimizer steps on its fp32 copy; empty where it steps on the model's own."""
    places: dict[torch.Tensor, Place] = {}
    if hasattr(optimizer, "fp32_groups_flat"):  # FP16_Optimizer: one flat copy a group
        for lows, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
            offset = 0
            for low in lows:
                places[low] = Place(flat, offset, low.numel())
                offset += low.numel()
    elif hasattr(optimizer, "fp32_groups"):  # FP16_UnfusedOptimizer: one copy a parameter
        for lows, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            places.update({low: Place(m, 0, m.numel()) for low, m in zip(lows, masters, strict=True)})
    return places
