"""The moments of an Adam inside DeepSpeed, seen as a shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..errors import ConfigError
from ..links import Link
from ..optim.two_phase_adam import Place, TwoPhaseAdam
from ..shard import ShardLayout


@dataclass(frozen=True)
class Placement:
    """Where parameters stand in the tensors that an optimizer steps on.

    Attributes:
        layout: of the shard.
        places: one for each segment of `layout`, in the same order.
        stepped: by name, all that this rank's optimizer steps on; more than the shard where every rank updates
            everything.
        names: of all trained parameters of the model, in one order on all ranks.
        device: of the shard.
    """

    layout: ShardLayout
    places: list[Place]
    stepped: list[tuple[str, Place]]
    names: list[str]
    device: torch.device

    def read(self) -> list[tuple[str, torch.Tensor]]:
        """What this rank's optimizer steps on, as 1-d views, by name."""
        return [
            (name, place.param.detach().reshape(-1)[place.start : place.start + place.numel].to(self.device))
            for name, place in self.stepped
        ]


class ShardAdam:
    """`methods.AdamState` over an optimizer whose tensors are not laid out like the shard.

    Args:
        node, peers: links to the ranks that own the other shards, and the same shard.
        others: links to ranks that hold other parameters of the same model.

    Raises:
        ConfigError: the optimizer does not step on the tensors of `placement`.
    """

    def __init__(
        self, optimizer: TwoPhaseAdam, placement: Placement, node: Link, peers: Link, others: Sequence[Link]
    ) -> None:
        self._optimizer, self._placement = optimizer, placement
        self._node, self._peers, self._others = node, peers, others
        held = {id(param) for group in optimizer.optimizer.param_groups for param in group["params"]}
        # (Stage 3 hands its tensors over at each step and takes them back: there is nothing to see in between.)
        if held and not any(id(place.param) in held for _, place in placement.stepped):
            raise ConfigError(
                f"the optimizer {type(optimizer.optimizer).__name__} keeps its moments where method 'sparse_momentum' "
                f"cannot see them. What to do: set \"torch_adam\": true in the optimizer's params, or use ZeRO stage 1."
            )

    @property
    def betas(self) -> tuple[float, float]:
        return self._optimizer.betas

    @property
    def lr(self) -> float:
        return self._optimizer.lr

    @property
    def frozen(self) -> bool:
        return self._optimizer.frozen

    def freeze(self) -> list[str]:
        """Freezes the variance, at the scale of each parameter's mean over the entries that had a gradient.

        For a parameter none of which had one, the largest mean of all parameters stands in: its first steps are
        rather too short than too long.

        Returns:
            The names of those parameters.
        """
        names = self._placement.names
        index = {name: i for i, name in enumerate(names)}
        totals = torch.zeros(2, len(names), dtype=torch.float64, device=self._placement.device)
        parts = self._read(self._optimizer.second_moment)
        for segment, part in zip(self._placement.layout.segments, parts, strict=True):
            totals[0, index[segment.name]] += part.sum(dtype=torch.float64)
            totals[1, index[segment.name]] += part.count_nonzero()
        sums, counts = self._everywhere(totals).tolist()
        means = {name: sums[i] / counts[i] for name, i in index.items() if counts[i]}
        unknown = max(means.values(), default=1.0)
        self._optimizer.freeze((place, means.get(name, unknown)) for name, place in self._placement.stepped)
        return [name for name in names if name not in means]

    def first_moment(self) -> torch.Tensor:
        out = torch.empty(self._placement.layout.numel, device=self._placement.device)
        return self._placement.layout.flatten_(out, self._read(self._optimizer.first_moment))

    def variance_norm(self) -> float:
        norm = torch.zeros(1, dtype=torch.float64, device=self._placement.device)
        for part in self._read(self._optimizer.second_moment):
            norm += part.sum(dtype=torch.float64)
        self._everywhere(norm)
        for link in self._others:
            link.sum_(norm)
        return float(norm) / self._peers.size

    # Over peers too, which hold the same: what follows from the sum must be the same bits on all ranks.
    def _everywhere(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._peers.sum_(self._node.sum_(tensor))

    def _read(self, moment: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        places = self._placement.places
        flat = {id(place.param): moment(place.param).reshape(-1) for place in places}
        return [flat[id(place.param)][place.start : place.start + place.numel] for place in places]
