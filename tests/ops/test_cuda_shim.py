"""The CUDA kernels, run on the CPU by the host shim in seeded schedules, equal the reference bit for bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from ops import reference
from ops.cuda.launch import Module
from ops.cuda.pipeline import CudaTier
from ops.types import Accumulation

from .battery import Case, assert_like_reference, chunked, ks_for, mstopk, topk
from .distributions import MAKERS
from .shim_launcher import CUDA, ShimError, ShimLauncher, compiler, cuda_source

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler to build the shim with")

LAUNCHER = ShimLauncher()
SEEDS = itertools.count()
# What a bad guess, a full buffer and a good guess lead to; the last with one block at a time.
GUESSES: dict[str, dict[str, int | None]] = {
    "sampled": {"guess": None},
    "too low, small buffer": {"guess": 0x3F000000, "capacity": 999},
    "too high": {"guess": 0x7F800001},
}


def tier(**settings: int | None) -> CudaTier:
    """Every call gets a schedule of its own; a failure shows the seed in the launcher's repr."""
    LAUNCHER.seed = next(SEEDS)
    LAUNCHER.resident = 1 + LAUNCHER.seed % 4
    return CudaTier(LAUNCHER, **settings)


@pytest.mark.parametrize("guess", GUESSES)
@pytest.mark.parametrize("name", MAKERS)
def test_topk_equals_the_reference(name: str, guess: str) -> None:
    for n, momentum in ((1, 0.9), (7, None), (1000, 0.9), (9001, None)):
        for k in ks_for(n):
            assert_like_reference(tier(**GUESSES[guess]), Case(name, n, momentum=momentum), topk(k))


@pytest.mark.parametrize("name", MAKERS)
def test_long_enough_to_be_sampled(name: str) -> None:
    for k in (40, 4000):
        assert_like_reference(tier(), Case(name, 40_001, momentum=0.9), topk(k))


@pytest.mark.parametrize("form", [{"grad": "bf16", "decay": 0.9}, {"grad": "fp16"}, {"grad": "bf16", "momentum": 0.5}])
@pytest.mark.parametrize("name", ["gaussian", "heavy_tails", "denormals", "ties"])
def test_other_gradients(name: str, form: dict) -> None:
    for n in (9001, 40_001):
        assert_like_reference(tier(), Case(name, n, **form), topk(n // 100))
    assert_like_reference(tier(), Case(name, 5003, **form), chunked(40, 4096))


@pytest.mark.parametrize("name", MAKERS)
def test_mstopk_and_chunked_equal_the_reference(name: str) -> None:
    for n in (1, 1000, 9001):
        case = Case(name, n)
        for k, samplings in zip(ks_for(n), itertools.cycle((30, 10, 1, 31)), strict=False):
            assert_like_reference(tier(), case, mstopk(k, samplings, seed=k))
        for k_c, chunk in ((0, 64), (1, 1 if n == 1 else 100), (40, 1000), (41, 4096), (4096, 4096)):
            assert_like_reference(tier(), case, chunked(k_c, chunk))


def test_mstopk_without_a_gradient() -> None:
    residual = torch.randn(5000)
    expected = residual.clone()
    theirs = reference.mstopk_(expected, None, 50, 12, 3)
    ours = tier().mstopk_(residual, None, 50, 12, 3)
    assert torch.equal(ours.indices, theirs.indices) and torch.equal(residual, expected)


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_unaligned_views_are_served(offset: int) -> None:
    residual, grad = torch.randn(9003), torch.randn(9003)
    expected = residual[offset:].clone()
    theirs = reference.topk_(expected, Accumulation(grad[offset:].clone()), 90)
    ours = tier().topk_(residual[offset:], Accumulation(grad[offset:]), 90)
    assert torch.equal(ours.indices, theirs.indices) and torch.equal(residual[offset:], expected)


def test_the_work_shows_which_path_was_taken() -> None:
    """The control for the guesses: a good one looks at the candidates, a bad one at everything."""
    case = Case("gaussian", 40_001)
    looked_at = {name: int(assert_like_reference(tier(**g), case, topk(400)).candidates) for name, g in GUESSES.items()}
    assert 400 <= looked_at["sampled"] < 1200
    assert looked_at["too high"] == looked_at["too low, small buffer"] == 40_001


@pytest.mark.parametrize("seed", range(12))
def test_schedules_do_not_matter(seed: int) -> None:
    """The same case in twelve interleavings, up to eight blocks at a time."""
    launcher = ShimLauncher(seed=1000 + seed, resident=1 + seed % 8)
    assert_like_reference(CudaTier(launcher), Case("gaussian", 50_001, momentum=0.9), topk(500))
    assert_like_reference(CudaTier(launcher, guess=0x7F800001), Case("ties", 20_001), topk(500))


@pytest.mark.parametrize("seed", range(3))
def test_look_back_beyond_one_window(seed: int) -> None:
    """48 blocks at a time: some wait for tiles more than a warp's 32 away."""
    launcher = ShimLauncher(seed=2000 + seed, resident=48)
    assert_like_reference(CudaTier(launcher), Case("gaussian", 200_001), topk(2000))


def test_nans_tie_whatever_their_payload() -> None:
    bits = torch.zeros(5000, dtype=torch.int32)
    bits[[10, 20, 4000]] = torch.tensor([0x7F800002, 0x7FC00000, 0x7FFFFFFF], dtype=torch.int32)
    assert tier().topk_(bits.view(torch.float32), None, 2).indices.tolist() == [10, 20]


def test_scatter_add_and_its_bounds() -> None:
    out, values = torch.randn(5000), torch.randn(700)
    indices = torch.randperm(5000)[:700].sort().values.int()
    expected = out.clone()
    expected[indices.long()] += values
    tier().scatter_add_(out, indices, values)
    assert torch.equal(out, expected)
    with pytest.raises(ShimError, match="trap"):
        tier().scatter_add_(out, torch.tensor([5000], dtype=torch.int32), torch.ones(1))


BROKEN = {
    "waiting for another block that never comes": (
        "__shared__ u32 x; if (blockIdx.x == 0) while (state->total == 0) __nanosleep(20); (void)x;",
        "deadlock or livelock",
    ),
    "half a block at a barrier": ("if (threadIdx.x < 128) __syncthreads();", "left while others wait|has left"),
    "two barriers for one": ("if (threadIdx.x < 128) __syncthreads();\nelse __syncthreads();", "different barriers"),
    "a lane outside the mask": ("__ballot_sync(0x0000ffffu, true);", "without being in its mask"),
    "half a warp in a collective": ("if (threadIdx.x % 32 < 16) __any_sync(0xffffffffu, true);", "left|has left"),
    "two collectives for one": (
        "if (threadIdx.x % 32 < 16) __any_sync(0xffffffffu, true); else __ballot_sync(0xffffffffu, true);",
        "different collectives",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_shim_reports_broken_kernels(name: str) -> None:
    """The control for all of the above: a check that cannot fail checks nothing."""
    body, message = BROKEN[name]
    source = f'#define THREADS 256\nextern "C" __global__ void broken(State* state) {{\n{body}\n}}\n'
    launcher = ShimLauncher(source=lambda file: source if file == "broken.cu" else cuda_source(file))
    module = Module(("device.cuh", "broken.cu"))
    state = torch.zeros(4096, dtype=torch.int64)
    with pytest.raises(ShimError, match=message):
        launcher.launch(module, "broken", 2, 256, [np.uint64(state.data_ptr())], state.device)


def test_shared_memory_is_poisoned() -> None:
    source = (
        '#define THREADS 256\nextern "C" __global__ void peek(u32* out) {\n'
        "__shared__ u32 x;\nif (threadIdx.x == 0) { out[blockIdx.x] = x; x = 0; }\n}\n"
    )
    launcher = ShimLauncher(source=lambda file: source if file == "peek.cu" else cuda_source(file))
    out = torch.zeros(3, dtype=torch.int32)
    launcher.launch(Module(("device.cuh", "peek.cu")), "peek", 3, 256, [np.uint64(out.data_ptr())], out.device)
    assert out.tolist() == [0xCDCDCDCD - (1 << 32)] * 3


def test_no_kernel_source_includes_a_header() -> None:
    for path in CUDA.glob("*.cu*"):
        assert "#include" not in path.read_text(), f"{path.name}: NVRTC would have to find it on the user's machine"
