"""Ranks that do not start alike are found before the first of them waits for another."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ds_sparse
import ds_sparse.agreement
from ds_sparse.agreement import Agreement, Start
from tests.engines import build_config, build_engine, build_model, train
from tests.ranks import RankError, run_ranks

SECTION: dict[str, Any] = {
    "method": "sparse_gradient", "topology": {"ranks_per_node": 2}, "compressor": {"density": 0.05},
    "exclude": {"min_numel": 20},
}  # fmt: skip
ODD = 2  # the rank that differs


def _start(change: Callable[[dict[str, Any]], Any] | None, make_model: Callable[[], torch.nn.Module]) -> None:
    os.environ["CROSS_RANK"] = str(dist.get_rank() // 2)
    config, model = build_config(optimizer="SGD", section=dict(SECTION)), build_model()
    if dist.get_rank() == ODD:
        if change is not None:
            change(config)
        model = make_model()
    train(build_engine(config, model=model), 1)


def refusal(
    change: Callable[[dict[str, Any]], Any] | None = None, make_model: Callable[[], torch.nn.Module] = build_model
) -> str:
    """The words in which all four ranks refuse to start."""
    with pytest.raises(RankError) as caught:
        run_ranks(4, _start, change, make_model)
    assert caught.value.types == dict.fromkeys(range(4), "ConfigError"), caught.value
    said = {line for line in str(caught.value).splitlines() if "ConfigError: " in line}
    assert len(said) == 1, said
    return said.pop()


def test_ranks_that_start_alike_start() -> None:
    """The control of all that follows."""
    run_ranks(4, _start, None, build_model)


def test_another_value_of_a_setting_is_named_with_the_ranks_that_have_it() -> None:
    said = refusal(lambda config: config["compressed_communication"].update(compressor={"density": 0.1}))
    host = os.uname().nodename
    others = ", ".join(f"rank {rank} ({host})" for rank in (0, 1, 3))
    assert f"'compressed_communication.compressor.density' is 0.1 on rank {ODD} ({host}) and 0.05 on {others};" in said
    assert "What to do: start every node with the same ds_config.json" in said


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config.pop("compressed_communication"),
        lambda config: config["compressed_communication"].update(enabled=False),
    ],
    ids=["absent", "disabled"],
)
def test_a_section_that_is_off_on_one_rank_is_found_on_all(change: Any) -> None:
    said = refusal(change)
    assert f"'compressed_communication' is left out, or its 'enabled' is false, on rank {ODD} (" in said
    assert "it is enabled on rank 0 (" in said


def test_a_section_that_one_rank_refuses_is_refused_on_all() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(4, _start, lambda config: config["compressed_communication"].update(densty=1), build_model)
    assert caught.value.types == dict.fromkeys(range(4), "ConfigError")
    assert "ConfigError: 'compressed_communication.densty' is not a known key" in str(caught.value)
    assert str(caught.value).count(f"ConfigError: on rank {ODD} (") == 3


def _wider() -> torch.nn.Module:
    model = build_model()
    model[2] = torch.nn.Linear(33, 30)
    model[4] = torch.nn.Linear(30, 5)
    return model


def _without_bias() -> torch.nn.Module:
    model = build_model()
    model[2] = torch.nn.Linear(33, 29, bias=False)
    return model


def _frozen() -> torch.nn.Module:
    model = build_model()
    model[2].weight.requires_grad_(False)
    return model


def _in_bf16() -> torch.nn.Module:
    return build_model().bfloat16()


def _in_another_order() -> torch.nn.Module:
    model = torch.nn.Sequential()
    for name, child in reversed(list(build_model().named_children())):
        model.add_module(name, child)
    return model


@pytest.mark.parametrize(
    ("make_model", "parameter", "odd", "usual"),
    [
        (_wider, "2.weight", "[30, 33] torch.float32", "[29, 33] torch.float32"),
        (_without_bias, "2.bias", "missing", "[29] torch.float32"),
        (_frozen, "2.weight", "[29, 33] torch.float32 frozen", "[29, 33] torch.float32"),
        (_in_bf16, "0.weight", "[33, 17] torch.bfloat16", "[33, 17] torch.float32"),
        (_in_another_order, "the order of parameters", "4.weight, 4.bias, 2.weight", "0.weight, 0.bias, 2.weight"),
    ],
)
def test_another_model_is_named_by_the_first_parameter_that_differs(
    make_model: Any, parameter: str, odd: str, usual: str
) -> None:
    said = refusal(make_model=make_model)
    assert f"the parameter '{parameter}' is {odd}" in said
    assert f" on rank {ODD} (" in said and f"and {usual}" in said
    assert "What to do: build the same model everywhere" in said


def _late() -> float:
    if dist.get_rank() == 1:
        time.sleep(4)
        return 0.0
    started = time.perf_counter()
    said = r"rank 1 did not start to build an engine within 1 s\. What to do"
    with pytest.raises(ds_sparse.ExchangeError, match=said):
        build_engine(build_config(optimizer="SGD", section=SECTION | {"topology": {"timeout_seconds": 1}}))
    return time.perf_counter() - started


def test_a_rank_that_does_not_come_is_named_after_the_timeout() -> None:
    waited = run_ranks(2, _late)[0]
    assert 1 <= waited < 4  # before the other one comes


def _off_and_early() -> float:
    ds_sparse.agreement.OFF_SECONDS = 0.5  # type: ignore[attr-defined]
    if dist.get_rank() == 1:
        return 0.0
    started = time.perf_counter()
    Agreement(Start(None, "", {}, range(2)), None).require()
    return time.perf_counter() - started


def test_a_rank_whose_section_is_off_does_not_wait_for_ever() -> None:
    """It may be the only one that builds an engine."""
    waited = run_ranks(2, _off_and_early, group_timeout=60)[0]
    assert 0.5 <= waited < 30
