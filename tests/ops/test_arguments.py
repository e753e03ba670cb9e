"""Misuse is refused before anything changes, and the message says what was wrong with what."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import ops
from ops import tiers


def vectors(n: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(n), torch.ones(n)


r, g = vectors()
i, b = torch.arange(2, dtype=torch.int32), torch.zeros(12, dtype=torch.uint8)
MISUSES: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "k above n": (lambda: ops.ef_topk_(r, g, 9), ValueError, r"k must be in 0\.\.8 \(residual.numel\(\)\), got 9"),
    "negative k": (lambda: ops.ef_topk_(r, g, -1), ValueError, "got -1"),
    "k as float": (lambda: ops.ef_topk_(r, g, 2.0), TypeError, "k must be an int, got 2.0"),
    "k as bool": (lambda: ops.ef_topk_(r, g, True), TypeError, "k must be an int, got True"),
    "fp64 residual": (lambda: ops.ef_topk_(r.double(), g, 1), TypeError, "residual must have dtype torch.float32, got"),
    "integer grad": (lambda: ops.ef_topk_(r, g.int(), 1), TypeError, "grad must have dtype .*bfloat16.*int32"),
    "grad of None": (lambda: ops.ef_topk_(r, None, 1), TypeError, "grad must be a torch.Tensor, got NoneType"),
    "matrix": (lambda: ops.ef_topk_(r.view(2, 4), g, 1), ValueError, r"flat .* got shape \(2, 4\)"),
    "strided": (lambda: ops.ef_topk_(torch.ones(16)[::2], g, 1), ValueError, r"contiguous, got stride \(2,\)"),
    "short grad": (lambda: ops.ef_topk_(r, g[:7], 1), ValueError, r"grad must have as many elements .* \(8\), got 7"),
    "other device": (lambda: ops.ef_topk_(r, g.to("meta"), 1), ValueError, r"device of residual \(cpu\), got meta"),
    "unknown device": (lambda: ops.ef_topk_(r.to("meta"), g.to("meta"), 1), ValueError, "cpu or cuda, got meta"),
    "momentum alone": (lambda: ops.ef_topk_(r, g, 1, momentum=0.9), ValueError, "momentum and velocity go together"),
    "velocity alone": (lambda: ops.ef_topk_(r, g, 1, velocity=g), ValueError, "momentum and velocity go together"),
    "momentum of 2": (lambda: ops.ef_topk_(r, g, 1, momentum=2, velocity=g), ValueError, r"in \[0, 1\], got 2"),
    "bf16 velocity": (lambda: ops.ef_topk_(r, g, 1, momentum=0.9, velocity=g.bfloat16()), TypeError, "velocity must"),
    "decay as text": (lambda: ops.ef_topk_(r, g, 1, decay="1"), TypeError, "decay must be a number, got '1'"),
    "no samplings": (lambda: ops.mstopk_(r, 1, samplings=0), ValueError, "samplings must be in 1.."),
    "negative seed": (lambda: ops.mstopk_(r, 1, seed=-1), ValueError, "seed must be in 0.."),
    "decay without grad": (lambda: ops.mstopk_(r, 1, decay=0.5), ValueError, "pass grad as well"),
    "large chunk": (lambda: ops.chunked_topk_(r, g, 1, 5000), ValueError, r"chunk must be in 1\.\.4096, got 5000"),
    "k_c above chunk": (lambda: ops.chunked_topk_(r, g, 5, 4), ValueError, r"k_c must be in 0\.\.4 \(chunk\), got 5"),
    "int64 indices": (lambda: ops.scatter_add_(r, torch.zeros(1).long(), g[:1]), TypeError, "indices must have dtype"),
    "more values": (lambda: ops.scatter_add_(r, torch.zeros(1).int(), g[:2]), ValueError, r"values .* \(1\), got 2"),
    "unknown encoding": (lambda: ops.index_bytes("rle", 1, 8), ValueError, "one of int32, .*, chunk12, got 'rle'"),
    "unknown value dtype": (lambda: ops.value_bytes("fp8", 1), ValueError, "dtype must be one of fp32, .*, got 'fp8'"),
    "more indices than n": (lambda: ops.encode_indices(i, 1, "int32"), ValueError, r"k must be in 0\.\.1 \(n\), got 2"),
    "n of 2^31": (lambda: ops.index_bytes("int32", 1, 1 << 31), ValueError, "n must be in 0..2147483647, got 2147"),
    "chunk12 without k_c": (lambda: ops.encode_indices(i, 8, "chunk12"), ValueError, "'chunk12' needs k_c"),
    "chunk12 of another k": (lambda: ops.index_bytes("chunk12", 3, 8, 2), ValueError, "exactly 2 .* k_c=2, got k=3"),
    "short out": (
        lambda: ops.encode_indices(i, 8, "int32", out=b),
        ValueError,
        "out must have exactly 8 bytes .* got 12",
    ),
    "odd out": (lambda: ops.encode_values_(g[:2], "fp32", out=b[1:9]), ValueError, "out must start at a multiple of 4"),
    "out of fp32": (lambda: ops.encode_values_(g, "fp32", out=g), TypeError, "out must have dtype torch.uint8, got"),
    "long message": (
        lambda: ops.decode_values(b, 2, "fp32"),
        ValueError,
        "encoded must have exactly 8 bytes .* got 12",
    ),
    "cut message": (lambda: ops.decode_indices(b, 4, 9, "int32"), ValueError, "encoded must have exactly 16 bytes"),
    "fp64 values": (lambda: ops.encode_values_(g.double(), "fp32"), TypeError, "values must have dtype torch.float32"),
    "a peer too few": (lambda: ops.sum_payloads_(r, [], [g]), ValueError, "one entry per peer"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_refused_and_changes_nothing(name: str) -> None:
    call, error, message = MISUSES[name]
    with pytest.raises(error, match=message):
        call()
    assert bool((r == 1).all()) and bool((g == 1).all())


@pytest.mark.parametrize("indices", [[-1], [8], [3, 3], [5, 2]], ids=str)
def test_indices_outside_or_out_of_order_are_refused(indices: list[int]) -> None:
    out = torch.zeros(8)
    with pytest.raises(ValueError, match="ascend strictly within 0..7"):
        ops.scatter_add_(out, torch.tensor(indices, dtype=torch.int32), torch.ones(len(indices)))
    assert bool((out == 0).all())


@pytest.mark.parametrize("tier", ["native", "numpy", "reference"])
def test_inputs_that_require_grad_are_served(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_SPARSE_CPU_TIER", tier)
    choice = tiers.cpu_choice.__wrapped__()
    if choice.tier is None:
        pytest.skip(choice.reason)
    monkeypatch.setattr(tiers, "cpu_choice", lambda: choice)
    residual, grad, velocity = (torch.ones(4, requires_grad=True) for _ in range(3))
    assert ops.ef_topk_(residual, grad, 2, momentum=0.5, velocity=velocity).indices.tolist() == [0, 1]
    ops.scatter_add_(residual, torch.tensor([0], dtype=torch.int32), grad[:1])
    assert residual.tolist() == [1.0, 0.0, 2.5, 2.5]
