"""A checkpoint resumed on other nodes and ranks: nothing is lost, nothing counts twice, training goes on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_sparse.errors import CheckpointError
from tests.engines import build_config, build_engine, build_model, replicas_equal, train
from tests.ranks import run_ranks

OWNING = {"topology": {}, "exchange": {"type": "reduce_scatter"}, "fallback": "off", "exclude": {"min_numel": 20}}
GRADIENT = OWNING | {"method": "sparse_gradient", "error_feedback": {"momentum": 0.9}}
MOMENTUM = OWNING | {"method": "sparse_momentum", "sparse_momentum": {"freeze_step": 3}}
SETUPS: dict[int, dict[str, Any]] = {  # by ZeRO stage
    0: {"optimizer": "SGD0", "section": GRADIENT | {"compressor": {"density": 0.05}}},
    1: {"optimizer": "AdamW", "section": MOMENTUM | {"compressor": {"density": 0.05}}},
    2: {"optimizer": "AdamW", "dtype": "bf16", "section": MOMENTUM | {"compressor": {"density": 0.2}}},
}
STOP = 6
Shape = tuple[int, int]  # nodes, ranks of each
SHAPES: list[Shape] = [(2, 2), (4, 1), (1, 4), (1, 2), (3, 1), (2, 1)]
PAIRS: list[tuple[Shape, Shape]] = [
    ((2, 2), (4, 1)), ((2, 2), (1, 4)), ((4, 1), (2, 2)), ((1, 4), (2, 2)), ((2, 2), (3, 1)), ((3, 1), (2, 2)),
    ((2, 2), (2, 1)), ((2, 1), (2, 2)), ((4, 1), (1, 2)), ((1, 2), (4, 1)), ((3, 1), (4, 1)), ((2, 1), (1, 2)),
]  # fmt: skip


def _engine(stage: int, shape: Shape, **more: Any) -> Any:
    setup = SETUPS[stage]
    section = setup["section"] | {"topology": {"ranks_per_node": shape[1]}}
    return build_engine(build_config(stage=stage, **setup | {"section": section} | more))


def _kept(engine: Any) -> dict[str, dict[str, tuple[int, torch.Tensor]]]:
    """Kind -> parameter -> first entry and entries that this rank has."""
    placement = engine.load_checkpoint.__self__._placement
    layout, method = placement.layout, engine.compressed_communication._level2.method
    kept: dict[str, Any] = {}
    state = {name: torch.zeros(layout.numel) for name in ("residual", "owned", "velocity", "momentum")}
    for name, tensor in method.state_dict().items():
        first = layout.sparse_numel if name == "dense_velocity" else 0
        state[name.removeprefix("dense_")][first : first + tensor.numel()] = tensor
    state["unsent"] = state.pop("residual") + state.pop("owned")
    for kind, flat in state.items():
        views = zip(layout.segments, layout.views(flat), strict=True)
        kept[kind] = {segment.name: (segment.offset, view.clone()) for segment, view in views}
    for segment, place in zip(layout.segments, placement.places, strict=True):
        moments = engine.optimizer.optimizer.state[place.param] if hasattr(engine.optimizer, "optimizer") else {}
        tensors = {"master": place.param} | {key: value for key, value in moments.items() if value.dim()}
        for kind, tensor in tensors.items():
            part = tensor.detach().reshape(-1)[place.start : place.start + place.numel].float().clone()
            kept.setdefault(kind, {})[segment.name] = (segment.offset, part)
    return kept


def _save_all(shapes: list[Shape], folder: str) -> dict[tuple[int, Shape], Any]:
    results = {}
    for stage in SETUPS:
        for shape in shapes:
            engine = _engine(stage, shape)
            train(engine, STOP)
            engine.save_checkpoint(f"{folder}/{stage}/{shape}")
            results[stage, shape] = _kept(engine)
    return results


def _resume_all(pairs: list[tuple[Shape, Shape]], folder: str) -> dict[Any, Any]:
    results = {}
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("ds_sparse").addHandler(handler)
    for stage in SETUPS:
        for old, new in pairs:
            engine = _engine(stage, new)
            heard.clear()
            engine.load_checkpoint(f"{folder}/{stage}/{old}")
            results[stage, old, new] = _kept(engine), list(heard), train(engine, 2, start=STOP)
    return results


def _by_world(pairs: list[Any], world: Any) -> dict[int, list[Any]]:
    return {w: [p for p in pairs if world(p) == w] for w in {world(p) for p in pairs}}


def _whole(ranks: list[Any], shape: Shape, kind: str) -> list[dict[str, torch.Tensor]]:
    """For each node: parameter -> all of its entries of a kind."""
    sizes = {name: param.numel() for name, param in build_model().named_parameters()}
    nodes = []
    for node in range(shape[0]):
        whole = {name: torch.full((numel,), torch.nan) for name, numel in sizes.items()}
        for rank in range(shape[1]):
            for name, (offset, part) in ranks[node * shape[1] + rank].get(kind, {}).items():
                whole[name][offset : offset + part.numel()] = part
        nodes.append(whole)
    return nodes


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """What was kept before, by stage and shape, and after, by stage, old and new shape; each a list of ranks."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    before: dict[Any, Any] = {}
    for world, shapes in _by_world(SHAPES, lambda shape: shape[0] * shape[1]).items():
        ranks = run_ranks(world, _save_all, shapes, folder)
        before |= {key: [rank[key] for rank in ranks] for key in ranks[0]}
    after: dict[Any, Any] = {}
    for world, pairs in _by_world(PAIRS, lambda pair: pair[1][0] * pair[1][1]).items():
        ranks = run_ranks(world, _resume_all, pairs, folder)
        after |= {key: [rank[key] for rank in ranks] for key in ranks[0]}
    return before, after


@pytest.mark.parametrize("stage", SETUPS)
@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_what_will_reach_the_parameters_is_kept(resumed, stage: int, old: Shape, new: Shape):
    """The mean over nodes, that is: an exchange sums over nodes and divides by their number."""
    before, after = resumed
    for kind in ("unsent", "velocity", "momentum"):
        was = _whole(before[stage, old], old, kind)
        now = _whole([kept for kept, *_ in after[stage, old, new]], new, kind)
        for name in was[0]:
            nodes = torch.stack([node[name] for node in was]).double()
            got = torch.stack([node[name] for node in now]).double().mean(0)
            # At most eight fp32 terms are added, each sum is rounded by 6e-8 of the terms that it is made of.
            assert ((got - nodes.mean(0)).abs() <= 5e-7 * nodes.abs().sum(0)).all(), (kind, name)
            if old[0] == new[0]:
                assert all(torch.equal(a[name], b[name]) for a, b in zip(was, now, strict=True)), (kind, name)


@pytest.mark.parametrize("stage", SETUPS)
def test_there_was_something_to_keep(resumed, stage: int):
    """The control of the test above."""
    before, _ = resumed
    for kind in ("unsent", "velocity" if stage == 0 else "momentum"):
        nodes = _whole(before[stage, (2, 2)], (2, 2), kind)
        assert all(node["2.weight"].count_nonzero() > 400 for node in nodes), kind
        assert not torch.equal(nodes[0]["2.weight"], nodes[1]["2.weight"]), kind


@pytest.mark.parametrize("stage", SETUPS)
@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_parameters_and_moments_are_kept_bit_for_bit(resumed, stage: int, old: Shape, new: Shape):
    before, after = resumed
    for kind in ("master",) if stage == 0 else ("master", "exp_avg", "exp_avg_sq"):
        was = _whole(before[stage, old], old, kind)[0]
        for node in _whole([kept for kept, *_ in after[stage, old, new]], new, kind):
            assert all(torch.equal(node[name], was[name]) for name in was), kind  # nan, which is in none, is unequal
            assert was["0.weight"].any()  # after the freeze, exp_avg is what was applied last: sparse


@pytest.mark.parametrize("stage", SETUPS)
@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_training_goes_on_and_says_what_was_done(resumed, stage: int, old: Shape, new: Shape):
    ranks = resumed[1][stage, old, new]
    histories = [history for *_, history in ranks]
    assert replicas_equal(histories)
    assert histories[0][-1].isfinite().all()
    assert not torch.equal(histories[0][0], histories[0][1])
    (line,) = ranks[0][1]
    start = f"checkpoint of {old[0]} nodes x {old[1]} ranks resumed on {new[0]} nodes x {new[1]} ranks: "
    assert line.startswith(start)
    assert (f"ZeRO's {old[1]} partitions are cut into {new[1]}" in line) == (stage > 0 and old[1] != new[1])
    assert ("each node keeps" in line) == (old[0] == new[0])


def _odd_engine(ranks_per_node: int, rotated: bool) -> Any:
    """Two parameter groups, of which ZeRO orders, pads and cuts each in its own way."""
    model = build_model()
    weights, biases = (
        [p for name, p in model.named_parameters() if name.endswith(kind)] for kind in ("weight", "bias")
    )
    zero = {"round_robin_gradients": rotated, "parameter_alignment": rotated}
    section = MOMENTUM | {"topology": {"ranks_per_node": ranks_per_node}}
    config = build_config(stage=2, dtype="bf16", section=section, zero_optimization=zero)
    groups = [{"params": biases, "weight_decay": 0.0}, {"params": weights}]
    return build_engine(config, model=model, model_parameters=groups)


def _save_odd(folder: str) -> Any:
    engine = _odd_engine(4, True)
    train(engine, 4)
    engine.save_checkpoint(folder)
    return _kept(engine)


def _resume_odd(folder: str) -> Any:
    results = []
    for ranks_per_node, rotated in ((2, True), (2, False), (1, True)):
        engine = _odd_engine(ranks_per_node, rotated)
        engine.load_checkpoint(folder)
        steps = {float(state["step"]) for state in engine.optimizer.optimizer.state.values()}
        decays = [group["weight_decay"] for group in engine.optimizer.optimizer.param_groups]
        results.append((_kept(engine), steps, decays, train(engine, 2, start=4)))
    return results


def test_order_and_padding_may_differ_as_well(tmp_path: Path):
    before = run_ranks(4, _save_odd, str(tmp_path))
    after = run_ranks(4, _resume_odd, str(tmp_path))
    for case, shape in enumerate([(2, 2), (2, 2), (4, 1)]):
        ranks = [results[case] for results in after]
        assert all(steps == {4.0} and decays == [0.0, 0.01] for _, steps, decays, _ in ranks)
        assert replicas_equal([history for *_, history in ranks])
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            (was,) = _whole(before, (1, 4), kind)
            for node in _whole([kept for kept, *_ in ranks], shape, kind):
                assert all(torch.equal(node[name], was[name]) for name in was), (shape, kind)


def _save_plain(folder: str) -> None:
    elastic = build_engine(build_config(zero_optimization={"elastic_checkpoint": True}), ours=False)
    train(elastic, 1)
    elastic.save_checkpoint(f"{folder}/elastic")
    model = build_model()
    model[0].bias.requires_grad_(False)
    frozen = build_engine(build_config(), ours=False, model=model)
    train(frozen, 1)
    frozen.save_checkpoint(f"{folder}/frozen")


def _refused(folder: str) -> list[str]:
    messages = []
    for name in ("elastic", "frozen"):
        with pytest.raises(CheckpointError) as caught:
            _engine(1, (1, 2)).load_checkpoint(f"{folder}/{name}")
        messages.append(str(caught.value))
    return messages


def test_what_cannot_be_cut_is_refused(tmp_path: Path):
    run_ranks(4, _save_plain, str(tmp_path))
    for elastic, frozen in run_ranks(2, _refused, str(tmp_path)):
        assert "written with 'zero_optimization.elastic_checkpoint'; allowed for another number" in elastic
        assert "What to do: load it on as many ranks as wrote it" in elastic
        assert "the checkpoint holds " in frozen and "What to do: build the model and the parameter gr" in frozen
