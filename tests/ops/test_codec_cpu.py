"""The codecs of the CPU tiers equal the reference bit for bit, on sound bytes and on any others."""

from __future__ import annotations

import pytest
import torch
from torch import Generator

from ops.layout import VALUE_BITS, index_layout
from ops.types import Tier

from .codec_battery import (
    VALUE_COUNTS,
    VALUE_MAKERS,
    assert_indices_like_reference,
    assert_values_like_reference,
    layouts,
)
from .test_cpu import TIERS

ISAS = {name: tier for name, tier in TIERS.items() if "," not in name}  # threads and guesses do not concern codecs
LAYOUTS = list(layouts())


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: f"{x.encoding}-{x.k}-{x.n}")
def test_indices_equal_the_reference(layout: tuple) -> None:
    for tier in (ISAS["numpy"], *list(ISAS.values())[-1:]):  # index codecs have one version for all instruction sets
        assert_indices_like_reference(tier, layout, Generator().manual_seed(layout.k))


@pytest.mark.parametrize("dtype", VALUE_BITS)
@pytest.mark.parametrize("tier", ISAS)
def test_values_equal_the_reference(tier: str, dtype: str) -> None:
    for name in VALUE_MAKERS:
        for k in VALUE_COUNTS:
            assert_values_like_reference(ISAS[tier], name, k, dtype)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("tier", ISAS)
def test_every_pattern_of_the_upper_bits_is_rounded_alike(tier: str, dtype: str) -> None:
    """All exponents and mantissas down to bit 12, with the lower bits at, below and above a tie."""
    upper = torch.arange(1 << 20, dtype=torch.int64) << 12
    for lower in (0, 1, 0x7FF, 0x800, 0x801, 0xFFF):
        bits = (upper | lower).where(upper < 1 << 31, (upper | lower) - (1 << 32)).int()
        _assert_rounded_alike(ISAS[tier], bits.view(torch.float32), dtype)


def _assert_rounded_alike(tier: Tier, values: torch.Tensor, dtype: str) -> None:
    """Against torch's own conversion, which is not how the kernels do it."""
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    out = torch.empty(2 * values.numel(), dtype=torch.uint8)
    tier.encode_values_(values.clone(), dtype, out)
    got, finite = out.view(half).float(), values.isfinite()
    largest = torch.finfo(half).max
    assert torch.equal(got[finite], values[finite].to(half).float().clamp(-largest, largest))
    assert torch.equal(got[values.isinf()], values[values.isinf()]) and bool(got[values.isnan()].isnan().all())


WRONG = {
    "descending": [3, 2, 5],
    "twice the same": [2, 2, 5],
    "negative": [-1, 2, 5],
    "n itself": [1, 2, 8192],
}


@pytest.mark.parametrize("encoding", ["int32", "elias_fano", "bitmap"])
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("tier", ISAS)
def test_indices_that_cannot_be_encoded_are_refused(tier: str, name: str, encoding: str) -> None:
    layout = index_layout(encoding, 3, 8192)
    out = torch.empty(layout.total_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"ascend strictly within 0\.\.8191; the encoded"):
        ISAS[tier].encode_indices(torch.tensor(WRONG[name], dtype=torch.int32), layout, out)


@pytest.mark.parametrize("indices", [[1, 2, 3, 4], [1, 4096, 4097, 4098], [1, 2, 3, 8191]], ids=str)
@pytest.mark.parametrize("tier", ISAS)
def test_chunk12_refuses_chunks_that_are_not_full(tier: str, indices: list[int]) -> None:
    layout = index_layout("chunk12", 4, 8192, 2)
    with pytest.raises(ValueError, match=r"within 0\.\.8191, 2 in every chunk of 4096"):
        ISAS[tier].encode_indices(torch.tensor(indices, dtype=torch.int32), layout, torch.empty(8, dtype=torch.uint8))
