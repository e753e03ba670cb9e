"""Shards are not alike: one may hold only excluded entries, another only rows that saw no gradient, or nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_sparse.adapter.stage0 import _master_places
from tests.engines import build_config, build_engine, furthest, replicas_equal, train
from tests.ranks import run_ranks

COMMON = {"topology": {"ranks_per_node": 2}, "compressor": {"density": 0.05}}
METHODS = {
    "gradient": ({"method": "sparse_gradient"}, "SGD"),
    "momentum": ({"method": "sparse_momentum", "sparse_momentum": {"freeze_step": 3}}, "AdamW"),
}


def _excluded(name: str, stage: int, dtype: str) -> Any:
    """The later two of three layers are excluded: the last shard of a node has nothing to compress."""
    section, optimizer = METHODS[name]
    section = COMMON | section | {"exclude": {"min_numel": 0, "patterns": [r"^[24]\."]}}
    engine = build_engine(
        build_config(stage=stage, dtype=dtype, optimizer=optimizer, clipping=0.05, section=section)
    )
    return train(engine, 8), engine.compressed_communication._level2.layout.sparse_numel


@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (0, "bf16"), (1, "fp32"), (2, "bf16")])
@pytest.mark.parametrize("name", METHODS)
def test_a_shard_with_nothing_to_compress_clips_like_the_others(name, stage, dtype):
    results = run_ranks(4, _excluded, name, stage, dtype)
    assert replicas_equal([history for history, _ in results])
    assert min(sparse for _, sparse in results) == 0 or stage > 0  # at stage 0 excluded entries stand last


class _Bag(torch.nn.Module):
    """A table of 256 tokens, of which the later rows see no gradient for a while, and an unused branch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(256, 16)
        self.head = torch.nn.Linear(16, 4)
        self.branch = torch.nn.Linear(16, 4)

    def forward(self, tokens: torch.Tensor, late: bool) -> torch.Tensor:
        hidden = self.table(tokens)
        return self.head(hidden) + (self.branch(hidden) if late else 0.0)


def _rare(stage: int) -> float:
    section = COMMON | {"exclude": {"min_numel": 20}, "sparse_momentum": {"freeze_step": 10}}
    engine = build_engine(build_config(stage=stage, section=section), model=_Bag())
    before = torch.cat([p.detach().reshape(-1).clone() for p in engine.module.parameters()])
    for step in range(30):
        generator = torch.Generator().manual_seed(10 * step + torch.distributed.get_rank())
        tokens = torch.randint(0, 256 if step > 14 else 60, (32,), generator=generator)
        outputs = engine(tokens, step > 14)
        engine.backward((outputs - torch.nn.functional.one_hot(tokens % 4, 4)).square().mean())
        engine.step()
    after = torch.cat([p.detach().reshape(-1) for p in engine.module.parameters()])
    return (after - before).abs().max().item()


@pytest.mark.parametrize("stage", [0, 1])
def test_rows_and_branches_that_wake_up_after_the_freeze_do_not_blow_up(stage):
    moved = run_ranks(4, _rare, stage)[0]
    # 30 steps of lr 0.01 move an entry by 0.3 with Adam; the floor allows some ten times that, no floor some 10^10.
    assert 0.05 < moved < 5.0


def _tiny(stage: int) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 1, bias=False)  # fewer entries than ranks can share
    section = {"method": "sparse_gradient", "topology": {"ranks_per_node": 4}, "exclude": {"min_numel": 0}}
    engine = build_engine(build_config(stage=stage, optimizer="SGD", section=section), model=model)
    for step in range(3):
        engine.backward(engine(torch.full((2, 5), 1.0 + step + torch.distributed.get_rank())).sum())
        engine.step()
    return model.weight.detach().clone(), engine.compressed_communication._level2.layout.numel


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_rank_that_owns_nothing_takes_part(stage):
    results = run_ranks(8, _tiny, stage)
    assert min(numel for _, numel in results) == 0
    assert all(torch.equal(weight, results[0][0]) for weight, _ in results)


def _aligned(stage: int, section: dict[str, Any] | None) -> Any:
    zero = {"parameter_alignment": True}
    config = build_config(stage=stage, clipping=0.05, section=section, zero_optimization=zero)
    engine = build_engine(config, ours=section is not None)
    return train(engine, 6), float(engine.get_global_grad_norm())


@pytest.mark.parametrize("stage", [1, 2])
def test_padding_between_parameters_does_not_enter_the_norm(stage):
    ours, norm = run_ranks(4, _aligned, stage, {"method": "dense", "topology": {"ranks_per_node": 2}})[0]
    stock, stock_norm = run_ranks(4, _aligned, stage, None)[0]
    assert norm == pytest.approx(stock_norm, rel=1e-5)  # the same sum in another order
    assert furthest(ours, stock) < 2e-6


def test_the_fused_wrapper_steps_on_one_flat_copy_a_group():
    """bf16 at stage 0 with DeepSpeed's own Adam: the masters are found inside the flat copies."""
    lows = [torch.zeros(3), torch.zeros(2, 2), torch.zeros(5)]
    flats = [torch.zeros(7), torch.zeros(5)]
    places = _master_places(SimpleNamespace(fp16_groups=[lows[:2], lows[2:]], fp32_groups_flat=flats))
    assert [places[low].start for low in lows] == [0, 3, 0]
    assert [places[low].param is flats[0] for low in lows] == [True, True, False]
