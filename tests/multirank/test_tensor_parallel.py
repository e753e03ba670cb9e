"""Parameters that tensor-parallel ranks, or stages of a pipeline, hold copies of."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ds_sparse.adapter.parameters import Parameters
from tests.engines import build_config, build_engine
from tests.multirank import feature_models as models
from tests.ranks import run_ranks

SECTION = {
    "topology": {"ranks_per_node": 1},
    "compressor": {"density": 0.1},
    "exclude": {"min_numel": 0},
    "fallback": "off",
}


def _sliced(stage: int, section: dict[str, Any] | None, without_rule: bool = False, **more: Any) -> Any:
    if without_rule:
        Parameters._copied = lambda self, param: False
    optimizer = "AdamW" if section and section["method"] == "sparse_momentum" else "SGD0"
    config = build_config(stage=stage, optimizer=optimizer, section=section, **models.AUTO_TP, **more)
    engine = build_engine(config, ours=section is not None, model=models.Sliced())
    for step in range(8):
        models.sliced(engine, step)
    params = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    return params, float(engine.get_global_grad_norm() or 0.0)


COPIED = ("norm.weight", "norm.bias", "narrow.bias")
METHODS = {
    "gradient": SECTION | {"method": "sparse_gradient"},
    "momentum": SECTION | {"method": "sparse_momentum", "sparse_momentum": {"freeze_step": 3}},
}


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("name", METHODS)
def test_copies_stay_bitwise_equal_across_tensor_parallel_ranks(name: str, stage: int):
    ranks = [params for params, _ in run_ranks(4, _sliced, stage, METHODS[name])]
    for params in ranks[1:]:
        assert all(torch.equal(params[copied], ranks[0][copied]) for copied in COPIED)
    assert not torch.equal(ranks[0]["wide.weight"], ranks[1]["wide.weight"])  # split, not copied


def test_without_the_rule_copies_drift_apart():
    """The control: what a rank selects depends on what else it holds."""
    ranks = [params for params, _ in run_ranks(4, _sliced, 1, METHODS["gradient"], True)]
    assert not all(torch.equal(ranks[0][copied], ranks[1][copied]) for copied in COPIED)


def _first_norm(section: dict[str, Any] | None) -> float:
    config = build_config(stage=1, optimizer="SGD0", section=section, clipping=1e-3, **models.AUTO_TP)
    engine = build_engine(config, ours=section is not None, model=models.Sliced())
    engine.backward(engine(torch.linspace(-1, 1, 4 * 17).view(4, 17)).square().mean())
    engine.step()
    return float(engine.get_global_grad_norm())


def test_copies_count_once_in_the_norm():
    (stock, *_), ours = run_ranks(4, _first_norm, None), run_ranks(4, _first_norm, METHODS["gradient"])
    # On equal nodes the estimate for noisy ones is off by the square root of their number.
    assert ours == [pytest.approx(stock / math.sqrt(2), rel=1e-5)] * 4  # another order of sums


def _piped(with_rule: bool) -> Any:
    if not with_rule:
        Parameters.sent_dense = lambda self, name, param: False
    section = METHODS["gradient"]
    model = models.pipeline(True)
    engine = build_engine(build_config(stage=1, optimizer="SGD0", accumulation=2, section=section), model=model)
    for step in range(6):
        models.piped(engine, step)
    return dict(engine.module.named_parameters())["tied_modules.one.weight"].detach().clone()


def test_tied_weights_of_two_stages_stay_bitwise_equal():
    weights = run_ranks(4, _piped, True)
    assert all(torch.equal(weight, weights[0]) for weight in weights)


def test_without_the_rule_tied_weights_drift_apart():
    weights = run_ranks(4, _piped, False)
    assert not torch.equal(weights[0], weights[2])
