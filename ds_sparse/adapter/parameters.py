"""How level 2 treats each parameter of an engine."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank, bwc_tensor_model_parallel_world_size

from ..shard import Exclusion, Segment


class Parameters:
    """Decides which parameters are sent dense, and which are copies that do not count in norms.

    With tensor parallelism some parameters (norms, some biases) are not split but copied, and the stages of a pipeline
    hold copies of tied weights: each of those ranks has the same gradient of them and must take the same step. They
    are sent dense, since what a rank selects of them would depend on all else that it holds; and they count on the
    first of those ranks only.
    """

    def __init__(self, engine: Any, exclusion: Exclusion) -> None:
        self._exclusion = exclusion
        self._split = bwc_tensor_model_parallel_world_size(_tensor_parallel(engine)) > 1
        self._first = bwc_tensor_model_parallel_rank(_tensor_parallel(engine)) == 0
        tied = engine.module.get_tied_weights_and_groups() if engine.pipeline_parallelism else ()
        self._tied = {weight for weight, _ in tied}

    def sent_dense(self, name: str, param: torch.nn.Parameter) -> bool:
        return param in self._tied or self._copied(param) or self._exclusion.covers(name, full_numel(param))

    def segment(self, name: str, param: torch.nn.Parameter, numel: int, offset: int) -> Segment:
        """`numel` elements of a parameter from `offset` on, as part of a shard."""
        counted = not getattr(param, PIPE_REPLICATED, False) and (self._first or not self._copied(param))
        return Segment(name, numel, self.sent_dense(name, param), offset, counted=counted)

    def notes(self, module: torch.nn.Module) -> list[str]:
        """What the user should know: that nothing is compressed because nothing is marked as split."""
        if not self._split or any(map(is_model_parallel_parameter, module.parameters())):
            return []
        return [
            "no parameter is marked as split over the tensor-parallel ranks, so all are sent dense; mark those that "
            "are by `param.tensor_model_parallel = True` before the engine is built"
        ]

    def _copied(self, param: torch.nn.Parameter) -> bool:
        return self._split and not is_model_parallel_parameter(param)


def full_numel(param: torch.nn.Parameter) -> int:
    """Elements of a parameter, also where ZeRO stage 3 has taken it apart."""
    return int(getattr(param, "ds_numel", param.numel()))


def _tensor_parallel(engine: Any) -> Any:
    """The engine's `mpu`, or None where it knows of sequence parallelism only."""
    return engine.mpu if engine.mp_world_size > 1 else None
