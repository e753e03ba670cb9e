"""Adam's first moment crosses nodes, sparse, once its variance stands still."""

from __future__ import annotations

import math

import torch

from ..config import SparseMomentumSettings
from .base import AdamState, Context, Method
from .stream import SparseStream


class SparseMomentum(Method):
    """Two-phase Adam: 1-bit Adam's frozen variance (Tang et al. 2021, Algorithm 1) with a sparsified first moment.

    Dense phase: the mean gradient, dense; the optimizer is an ordinary Adam.
    Compressed phase, on node i with mean gradient g_i:

     1. m_i <- b m_i + (1 - b) g_i                    each node keeps a first moment of its own
     2. residual_i <- residual_i + m_i; take k        error feedback and selection
     3. u <- mean over nodes of what was taken        the optimizer then steps along u / sqrt(v), v frozen

    A sparse stream gives Adam a wrong second moment, hence the freeze. And it arrives late, as a momentum does, hence
    a decay b of its own that is smaller than Adam's beta1. docs/fidelity.md has figures for both.

    Attributes:
        momentum: m_i, fp32 [numel]; None during the dense phase.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        assert context.adam is not None  # adapter/checks.py refuses other optimizers
        self._adam: AdamState = context.adam
        self._freeze = FreezeRule(context.config.sparse_momentum, context)
        self._stream = SparseStream(context)
        self._decay = context.config.sparse_momentum.beta1
        self._frozen_at = 0
        self.feedback, self.fallback = self._stream.feedback, self._stream.fallback
        self.momentum: torch.Tensor | None = None

    def begin_step(self) -> bool:
        if self.momentum is None and self._context.peers.size > 1 and self._freeze.due(self.exchanged):
            self._enter_compressed_phase()
        return self.momentum is not None and self._stream.compresses(self.exchanged - self._frozen_at)

    def _enter_compressed_phase(self) -> None:
        self.momentum = self._adam.first_moment()
        self._frozen_at = self.exchanged
        unused = self._adam.freeze()
        self._context.notes.append(
            f"variance frozen after {self.exchanged} dense steps; from here on the momentum is sent compressed"
        )
        if unused:
            self._context.notes.append(
                f"parameters without any gradient until then get short steps from now on: {', '.join(unused)}"
            )

    def planned_bytes(self) -> int:
        return self._stream.planned_bytes()

    def _exchange_(self, shard: torch.Tensor) -> float:
        if self.momentum is None:
            return self._stream.mean_all_(shard)
        # 1. This node's first moment.
        self.momentum.mul_(self._decay).add_(shard, alpha=1.0 - self._decay)
        # 2. and 3. Error feedback, selection, mean.
        shard.copy_(self.momentum)
        return self._stream.mean_(shard, self.exchanged - self._frozen_at)

    def state_dict(self) -> dict[str, torch.Tensor]:
        momentum = {} if self.momentum is None else {"momentum": self.momentum}
        return super().state_dict() | momentum

    def counters(self) -> dict[str, float]:
        return super().counters() | {"frozen_at": self._frozen_at} | self._freeze.counters()

    def restart(self, counters: dict[str, float]) -> None:
        # The optimizer has been loaded before, and knows its phase. A momentum that is not filled in stays at zero:
        # the optimizer's own holds what was applied last, which must not be sent again.
        super().restart(counters)
        layout, device = self._context.layout, self._context.device
        self.momentum = torch.zeros(layout.numel, device=device) if self._adam.frozen else None
        self._frozen_at = int(counters.get("frozen_at", 0))
        self._freeze.load_counters(counters)


class FreezeRule:
    """When the variance may be frozen: after a given step, or when it has become stable.

    Stable (Tang et al. 2021, section 7.1, with the bias correction that short runs need): every 1/(1 - beta2) steps
    the L1 norm of the second moment is compared with the one before; the rule fires when it changed by less than the
    given factor in either direction and the learning rate has not risen in between.
    """

    def __init__(self, settings: SparseMomentumSettings, context: Context) -> None:
        assert context.adam is not None
        self._settings, self._adam = settings, context.adam
        self._every = max(1, math.ceil(1.0 / (1.0 - context.adam.betas[1]) - 1e-6))
        self._last_norm, self._last_lr = math.nan, math.inf

    def counters(self) -> dict[str, float]:
        return {"last_norm": self._last_norm, "last_lr": self._last_lr}

    def load_counters(self, counters: dict[str, float]) -> None:
        self._last_norm = counters.get("last_norm", math.nan)
        self._last_lr = counters.get("last_lr", math.inf)

    def due(self, step: int) -> bool:
        """Whether compression starts at step `step` (from 0). Same answer on all ranks; asked once a step."""
        if self._settings.freeze_step is not None:
            return step >= self._settings.freeze_step
        if step == 0 or step % self._every:
            return False
        norm, lr = self._adam.variance_norm(), self._adam.lr
        ratio = norm / self._last_norm if self._last_norm else math.nan  # nan at the first look: never stable
        stable = self._settings.stability <= ratio <= 1.0 / self._settings.stability and lr <= self._last_lr
        self._last_norm, self._last_lr = norm, lr
        return stable
