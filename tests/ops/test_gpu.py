"""The CUDA tier on a real GPU. Run by ``python -m benchmarks.gpu_suite``; skipped where there is none.

Needs torch, cupy, numpy and pytest, and neither deepspeed nor an installed package.
"""

from __future__ import annotations

import pytest
import torch
from torch import Generator

import ops
from ops import reference
from ops.cuda.pipeline import CudaTier
from ops.layout import INDEX_ENCODINGS, VALUE_BITS, IndexLayout
from ops.tiers import cuda_choice
from ops.types import Accumulation

from .battery import Case, assert_like_reference, chunked, ks_for, mstopk, same_bits
from .codec_battery import VALUE_COUNTS, VALUE_MAKERS, damaged, layouts, subsets
from .distributions import MAKERS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SIZES = (1, 7, 1000, 40_001, 1_000_003)
GUESSES: dict[str, dict[str, int | None]] = {
    "sampled": {"guess": None},
    "too low, small buffer": {"guess": 0x3F000000, "capacity": 999},
    "too high": {"guess": 0x7F800001},
}
FORMS = {
    "fp32": {},
    "bf16, decay": {"grad": "bf16", "decay": 0.9},
    "fp16": {"grad": "fp16"},
    "momentum": {"momentum": 0.9},
}


def tier(**settings: int | None) -> CudaTier:
    choice = cuda_choice()
    assert isinstance(choice.tier, CudaTier), choice.reason
    return CudaTier(choice.tier.launcher, **settings)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("guess", GUESSES)
@pytest.mark.parametrize("name", MAKERS)
def test_topk_equals_the_reference_on_the_cpu(name: str, guess: str, form: str) -> None:
    for n in SIZES:
        for k in ks_for(n):
            case = Case(name, n, **FORMS[form])
            residual, accumulation = case.build()
            expected = reference.topk_(residual, accumulation, k)
            ours, on_gpu = Case(name, n, **FORMS[form], device="cuda").build()
            got = tier(**GUESSES[guess]).topk_(ours, on_gpu, k)
            same_bits("indices", got.indices.cpu(), expected.indices)
            same_bits("values", got.values.cpu(), expected.values)
            same_bits("residual", ours.cpu(), residual)


@pytest.mark.parametrize("name", MAKERS)
def test_mstopk_and_chunked(name: str) -> None:
    for n in SIZES:
        case = Case(name, n, device="cuda")
        for k in ks_for(n):
            for samplings in (1, 12, 30):
                assert_like_reference(tier(), case, mstopk(k, samplings, seed=k))
        for k_c, chunk in ((40, 1000), (41, 4096)):
            assert_like_reference(tier(), case, chunked(k_c, chunk))


@pytest.mark.parametrize("layout", list(layouts()), ids=lambda x: f"{x.encoding}-{x.k}-{x.n}")
def test_index_codecs_equal_the_reference_on_the_cpu(layout: IndexLayout) -> None:
    g = Generator().manual_seed(layout.k)
    for indices in subsets(layout, g):
        expected = torch.empty(layout.total_bytes, dtype=torch.uint8)
        reference.encode_indices(indices, layout, expected)
        got = torch.full_like(expected, 0xCD, device="cuda")
        tier().encode_indices(indices.cuda(), layout, got)
        same_bits("bytes", got.cpu(), expected)
        for encoded in (expected, *damaged(expected, g, 3)):
            theirs, ours = reference.decode_indices(encoded, layout), tier().decode_indices(encoded.cuda(), layout)
            same_bits("indices", ours.indices.cpu(), theirs.indices)
            assert int(ours.corrupt) == int(theirs.corrupt)


@pytest.mark.parametrize("dtype", VALUE_BITS)
@pytest.mark.parametrize("name", VALUE_MAKERS)
def test_value_codecs_equal_the_reference_on_the_cpu(name: str, dtype: str) -> None:
    for k in (*VALUE_COUNTS, 1_000_003):
        theirs = VALUE_MAKERS[name](k, Generator().manual_seed(k))
        ours = theirs.cuda()
        expected, got = ops.encode_values_(theirs, dtype), ops.encode_values_(ours, dtype)
        if dtype == "fp32":  # the bits of a NaN are no part of the contract
            got, expected = got.view(torch.float32), expected.view(torch.float32)
        same_bits("bytes", got.cpu(), expected)
        same_bits("losses", ours.cpu(), theirs)
        decoded = ops.decode_values(got.view(torch.uint8), k, dtype)
        same_bits("values", decoded.cpu(), ops.decode_values(expected.view(torch.uint8), k, dtype))


def test_no_call_waits_for_the_device() -> None:
    residual, grad = torch.randn(1 << 20, device="cuda"), torch.randn(1 << 20, device="cuda")
    indices = torch.arange(0, 1 << 20, 256, dtype=torch.int32, device="cuda")

    def codecs() -> None:
        for encoding in INDEX_ENCODINGS:
            encoded = ops.encode_indices(indices, 1 << 20, encoding, k_c=16)
            ops.decode_indices(encoded, indices.numel(), 1 << 20, encoding, k_c=16)
        for dtype in VALUE_BITS:
            ops.decode_values(ops.encode_values_(grad[:999].clone(), dtype), 999, dtype)

    calls = [
        codecs,
        lambda: ops.ef_topk_(residual, grad, 1000),
        lambda: ops.mstopk_(residual, 1000, grad=grad),
        lambda: ops.chunked_topk_(residual, grad, 40),
        lambda: ops.scatter_add_(residual, torch.arange(9, device="cuda", dtype=torch.int32), grad[:9]),
    ]
    for call in calls:
        call()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_torchs_current_stream_is_used() -> None:
    """The addition before it on a side stream must have happened, without any synchronisation in between."""
    side = torch.cuda.Stream()
    grad = torch.ones(1 << 24, device="cuda")
    residual = torch.zeros(1 << 24, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(20):
            residual.add_(grad)
        selection = ops.ef_topk_(residual, grad, 10)
    side.synchronize()
    assert selection.values.tolist() == [21.0] * 10


def test_it_can_be_captured_in_a_cuda_graph() -> None:
    residual, grad = torch.zeros(1 << 18, device="cuda"), torch.randn(1 << 18, device="cuda")
    for _ in range(2):
        ops.ef_topk_(residual.clone(), grad, 100)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        selection = ops.ef_topk_(residual, grad, 100)
    residual.zero_()
    graph.replay()
    torch.cuda.synchronize()
    expected = reference.topk_(torch.zeros(1 << 18), Accumulation(grad.cpu()), 100)
    same_bits("indices", selection.indices.cpu(), expected.indices)


def test_scatter_add_in_peer_order() -> None:
    out = torch.zeros(3, device="cuda")
    at = torch.tensor([1], dtype=torch.int32, device="cuda")
    ops.sum_payloads_(out, [at] * 3, [torch.tensor([v], device="cuda") for v in (1e8, 1.0, -1e8)])
    assert out.tolist() == [0.0, 0.0, 0.0]


def test_a_large_vector_is_conserved() -> None:
    n = 100_000_007
    residual, grad = torch.randn(n, device="cuda"), torch.randn(n, device="cuda")
    before = residual + grad
    selection = ops.ef_topk_(residual, grad, n // 100)
    ops.scatter_add_(residual, selection.indices, selection.values)
    assert torch.equal(residual, before)
    assert int(selection.indices[-1]) < n and bool((selection.indices[1:] > selection.indices[:-1]).all())
