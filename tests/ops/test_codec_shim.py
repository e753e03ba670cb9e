"""The codecs' CUDA kernels, run on the CPU by the host shim in seeded schedules, equal the reference bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Generator

from ops.cuda.pipeline import CudaTier
from ops.layout import VALUE_BITS, index_layout

from .codec_battery import (
    VALUE_COUNTS,
    VALUE_MAKERS,
    assert_indices_like_reference,
    assert_values_like_reference,
    layouts,
)
from .shim_launcher import ShimError, ShimLauncher, compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler to build the shim with")

LAUNCHER = ShimLauncher()
SEEDS = itertools.count()


def tier() -> CudaTier:
    """Every call gets a schedule of its own."""
    LAUNCHER.seed = next(SEEDS)
    LAUNCHER.resident = 1 + LAUNCHER.seed % 4
    return CudaTier(LAUNCHER)


@pytest.mark.parametrize("layout", list(layouts()), ids=lambda x: f"{x.encoding}-{x.k}-{x.n}")
def test_indices_equal_the_reference(layout: tuple) -> None:
    assert_indices_like_reference(tier(), layout, Generator().manual_seed(layout.k), rounds=1)


@pytest.mark.parametrize("dtype", VALUE_BITS)
def test_values_equal_the_reference(dtype: str) -> None:
    for name in VALUE_MAKERS:
        for k in VALUE_COUNTS:
            assert_values_like_reference(tier(), name, k, dtype)


@pytest.mark.parametrize("seed", range(3))
def test_look_back_beyond_one_window(seed: int) -> None:
    """48 blocks at a time: some wait for tiles more than a warp's 32 away."""
    at_once = CudaTier(ShimLauncher(seed=3000 + seed, resident=48))
    assert_indices_like_reference(at_once, index_layout("bitmap", 4000, 400_000), Generator().manual_seed(seed), 0)


@pytest.mark.parametrize("encoding", ["int32", "elias_fano", "bitmap"])
@pytest.mark.parametrize("indices", [[3, 2, 5], [2, 2, 5], [-1, 2, 5], [1, 2, 8192]], ids=str)
def test_indices_that_cannot_be_encoded_are_trapped(encoding: str, indices: list[int]) -> None:
    layout = index_layout(encoding, 3, 8192)
    with pytest.raises(ShimError, match="trap"):
        tier().encode_indices(torch.tensor(indices, dtype=torch.int32), layout, torch.empty(2048, dtype=torch.uint8))


def test_chunk12_traps_chunks_that_are_not_full() -> None:
    layout = index_layout("chunk12", 4, 8192, 2)
    with pytest.raises(ShimError, match="trap"):
        indices = torch.tensor([1, 2, 3, 8191], dtype=torch.int32)
        tier().encode_indices(indices, layout, torch.empty(8, dtype=torch.uint8))
