"""TwoPhaseAdam: an Adam whose variance can be frozen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from .step import replace_step

# Smallest second moment that is frozen, as a share of its parameter's mean: a tenth of the root mean square gradient,
# so that a step is at most ten times as long as where the gradient is the usual one.
VARIANCE_FLOOR = 0.01


class Place(NamedTuple):
    """Entries of one of the optimizer's tensors: `numel` from `start` of the flattened `param`."""

    param: torch.Tensor
    start: int
    numel: int


class TwoPhaseAdam:
    """Puts a second phase behind an existing Adam or AdamW, of torch or of DeepSpeed.

    The optimizer object stays the user's own: its state, its parameter groups and any lr scheduler on it go on, and
    before `freeze` it steps as it always did, bit for bit. Only its `step` is replaced. After `freeze` a step takes
    `p.grad` for the first moment u that is to be applied (1-bit Adam, Tang et al. 2021, Algorithm 1, line 14):

        p <- p - lr * weight_decay * p
        p <- p - lr * u / (sqrt(v) + eps)

    with v the second moment, which `freeze` corrects for its bias once and for all and bounds from below: entries
    that had little or no gradient in the first phase, such as the embedding of a rare token, would otherwise be
    divided by hardly more than eps when they get one. u is taken to be without bias, as `first_moment` is. `exp_avg`
    then holds the u applied last. That the variance is frozen is noted in the parameter groups, so that it is saved
    and loaded with the optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._adam_step = replace_step(optimizer, self.step)

    @property
    def frozen(self) -> bool:
        return any(group.get("variance_frozen", False) for group in self.optimizer.param_groups)

    @property
    def betas(self) -> tuple[float, float]:
        return self.optimizer.param_groups[0]["betas"]

    @property
    def lr(self) -> float:
        return max(float(group["lr"]) for group in self.optimizer.param_groups)

    def freeze(self, means: Iterable[tuple[Place, float]]) -> None:
        """Ends the first phase.

        Args:
            means: the mean second moment, for each parameter, or each part of one, that is stepped on. It becomes
                that of entries that had no gradient; `VARIANCE_FLOOR` of it is the least for all others.
        """
        for param, state in self.optimizer.state.items():
            state["exp_avg_sq"].copy_(self.second_moment(param))
        for (param, start, numel), mean in means:
            if self._step_of(param):
                variance = self.optimizer.state[param]["exp_avg_sq"].view(-1)[start : start + numel]
                unseen = variance == 0
                variance.clamp_(min=VARIANCE_FLOOR * mean).masked_fill_(unseen, mean)
        for group in self.optimizer.param_groups:
            group["variance_frozen"] = True

    def second_moment(self, param: torch.Tensor) -> torch.Tensor:
        """The bias-corrected second moment of a parameter: v / (1 - beta2^t), zeros before its first step."""
        if not self._step_of(param):
            return torch.zeros_like(param)
        moment = self.optimizer.state[param]["exp_avg_sq"]
        return moment if self.frozen else moment / (1.0 - self.betas[1] ** self._step_of(param))

    def first_moment(self, param: torch.Tensor) -> torch.Tensor:
        """The bias-corrected first moment of a parameter: m / (1 - beta1^t), zeros before its first step."""
        if not self._step_of(param):
            return torch.zeros_like(param)
        return self.optimizer.state[param]["exp_avg"] / (1.0 - self.betas[0] ** self._step_of(param))

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        if not self.frozen:
            return self._adam_step(closure, **kwargs)
        loss = closure() if closure is not None else None
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._frozen_step_(param, param.grad, group)
        return loss

    @torch.no_grad()
    def _frozen_step_(self, param: torch.Tensor, moment: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.optimizer.state[param]
        if not state:  # no gradient in the first phase: without a variance there is no step to take
            return
        state["step"] += 1
        state["exp_avg"].copy_(moment)
        denominator = state["exp_avg_sq"].sqrt().add_(group["eps"])
        param.mul_(1.0 - group["lr"] * group["weight_decay"])
        param.addcdiv_(moment, denominator, value=-group["lr"])

    def _step_of(self, param: torch.Tensor) -> int:
        return int(self.optimizer.state.get(param, {}).get("step", 0))
