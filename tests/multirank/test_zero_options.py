"""The options of ZeRO, and of models, that change how gradients reach a shard."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engines import build_config, build_engine, build_model, furthest, replicas_equal, train
from tests.ranks import run_ranks

TWO_NODES = {"topology": {"ranks_per_node": 2}}
DENSE = TWO_NODES | {"method": "dense"}
SPARSE = TWO_NODES | {
    "compressor": {"density": 0.05},
    "exclude": {"min_numel": 20},
    "sparse_momentum": {"freeze_step": 3},
}
OPTIONS = {
    "overlap_comm": {"overlap_comm": True},
    "contiguous_gradients off": {"contiguous_gradients": False},
    "round_robin_gradients": {"round_robin_gradients": True},
    "reduce_scatter off": {"reduce_scatter": False},
    "one bucket": {"reduce_bucket_size": 10**6},
}


def _with_option(stage: int, option: dict[str, Any], section: dict[str, Any] | None) -> Any:
    config = build_config(stage=stage, accumulation=2, section=section, zero_optimization=option)
    return train(build_engine(config, ours=section is not None), 8)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_zero_change_nothing_of_the_result(stage, option):
    stock = run_ranks(4, _with_option, stage, OPTIONS[option], None)[0]
    assert furthest(run_ranks(4, _with_option, stage, OPTIONS[option], DENSE)[0], stock) < 2e-6  # order of sums
    assert replicas_equal(run_ranks(4, _with_option, stage, OPTIONS[option], SPARSE))


class _Odd(torch.nn.Module):
    """A frozen, an unused and a tied parameter around the usual model."""

    def __init__(self) -> None:
        super().__init__()
        self.body = build_model()
        self.unused = torch.nn.Linear(7, 7)
        self.frozen = torch.nn.Parameter(torch.ones(17), requires_grad=False)
        self.also_first = self.body[0]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.body(inputs * self.frozen.to(inputs.dtype))


def _odd_model(stage: int, section: dict[str, Any] | None) -> Any:
    model = _Odd()
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    config = build_config(stage=stage, section=section)
    engine = build_engine(config, ours=section is not None, model=model, model_parameters=groups)
    return train(engine, 6)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_frozen_unused_and_tied_parameters_and_two_groups(stage):
    stock = run_ranks(4, _odd_model, stage, None)[0]
    assert furthest(run_ranks(4, _odd_model, stage, DENSE)[0], stock) < 2e-6  # order of sums
    assert replicas_equal(run_ranks(4, _odd_model, stage, SPARSE))


def _explicit(stage: int, sharded: bool) -> int:
    engine = build_engine(build_config(stage=stage, section=SPARSE | {"sharded_update": sharded}))
    train(engine, 2)
    return engine.compressed_communication.stats.total.exchanges


@pytest.mark.parametrize(("stage", "sharded"), [(0, False), (1, True), (2, True)])
def test_the_update_is_sharded_as_asked(stage, sharded):
    assert run_ranks(4, _explicit, stage, sharded) == [2] * 4


def _unmanaged(stage: int, section: dict[str, Any] | None) -> Any:
    config = build_config(stage=stage, section=section, managed_gradient_accumulation=False)
    return train(build_engine(config, ours=section is not None), 5)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_boundary_that_the_caller_owns(stage):
    stock = run_ranks(4, _unmanaged, stage, None)[0]
    assert furthest(run_ranks(4, _unmanaged, stage, DENSE)[0], stock) < 2e-6  # order of sums
