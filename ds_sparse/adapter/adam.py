"""The moments of an Adam inside DeepSpeed, seen as a shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..optim.two_phase_adam import Place, TwoPhaseAdam
from ..shard import ShardLayout


class ShardAdam:
    """`methods.AdamState` over an optimizer whose tensors are not laid out like the shard.

    Args:
        optimizer: the two-phase optimizer.
        places: one for each segment of `layout`, in the same order.
        stepped: all that this rank's optimizer steps on; more than the shard where every rank updates everything.
    """

    def __init__(
        self, optimizer: TwoPhaseAdam, layout: ShardLayout, places: Sequence[Place], stepped: Sequence[Place]
    ) -> None:
        self._optimizer, self._layout, self._places, self._stepped = optimizer, layout, places, stepped

    @property
    def betas(self) -> tuple[float, float]:
        return self._optimizer.betas

    @property
    def lr(self) -> float:
        return self._optimizer.lr

    @property
    def frozen(self) -> bool:
        return self._optimizer.frozen

    def freeze(self) -> None:
        self._optimizer.freeze(self._stepped)

    def first_moment(self) -> torch.Tensor:
        device = self._places[0].param.device if self._places else torch.device("cpu")
        return self._layout.flatten_(torch.empty(self._layout.numel, device=device), self._read(
            self._optimizer.first_moment))

    def variance_norm(self) -> torch.Tensor:
        parts = [part.sum(dtype=torch.float64) for part in self._read(self._optimizer.second_moment)]
        return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)

    def _read(self, moment: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        flat = {id(place.param): moment(place.param).reshape(-1) for place in self._places}
        return [flat[id(place.param)][place.start : place.start + place.numel] for place in self._places]
