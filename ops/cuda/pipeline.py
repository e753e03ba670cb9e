"""The CUDA tier: which kernels run in which order, over torch's memory and on torch's current stream.

How a kernel is launched is the launcher's business: CuPy on a GPU (cupy_launcher.py), a host shim in the tests. No
step reads anything back, so the host never waits and the calls can be captured in a CUDA graph.

Traffic for n fp32 elements: 12 n bytes for the streaming pass, and a few bytes per candidate. After a bad guess (the
device decides) 4 n for each of three counting passes and 4 n for the emission are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..types import Accumulation, Selection, chunked_count
from .codec import CudaCodec
from .launch import THREADS, Argument, Launcher, Module, address, pointer, u32

SAMPLE_THREADS, TILE, SAMPLES = 512, 4096, 16384  # as in the sources
STATE_BYTES = 4 * (8 + 2048)  # struct State of device.cuh
ABOVE_ALL = 0x80000000
LEVEL_BITS = 11  # a counting pass has 2048 bins
EXACT_BITS = 31
BLOCKS_PER_PROCESSOR = 4  # for grid-stride kernels
MAX_ELEMENTS = (1 << 31) - TILE
_GRADS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


SELECT = Module(("device.cuh", "select.cu", "scatter.cu"))


def accumulating(grad_dtype: torch.dtype, velocity: bool) -> Module:
    sources = ("device.cuh", "accumulate.cuh", "stream.cu", "chunked.cu")
    return Module(sources, _GRADS[grad_dtype], int(velocity))


@dataclass
class CudaTier(CudaCodec):
    """The calls of :class:`ops.types.Tier` over a launcher. ``guess`` changes the time and never the result."""

    launcher: Launcher
    guess: int | None = None  # key to take as the guess instead of sampling one
    capacity: int | None = None  # candidates the buffer holds; None: 2 k and some

    def topk_(self, residual: Tensor, accumulation: Accumulation | None, k: int) -> Selection:
        """1. sample a guess  2. stream  3. put back if it was bad  4. three counting passes  5. emit."""
        n = residual.numel()
        call = _Call(self.launcher, residual, accumulation, k, min(n, self.capacity or 2 * k + 16 * TILE))
        if k == 0:
            call.stream(ABOVE_ALL)
            return call.selection
        call.stream(self.guess if self.guess is not None else None)
        return call.select(EXACT_BITS, None)

    def mstopk_(
        self, residual: Tensor, accumulation: Accumulation | None, k: int, samplings: int, seed: int
    ) -> Selection:
        """Accumulate, then count 2047 thresholds a pass over the whole vector until all samplings are made; emit."""
        call = _Call(self.launcher, residual, accumulation, k, 1)
        call.stream(ABOVE_ALL)
        return call.select(min(samplings, EXACT_BITS), seed) if k else call.selection

    def chunked_topk_(self, residual: Tensor, accumulation: Accumulation | None, k_c: int, chunk: int) -> Selection:
        n = residual.numel()
        emitted = chunked_count(n, k_c, chunk)
        call = _Call(self.launcher, residual, accumulation, emitted, 1)
        if emitted == 0:
            call.stream(ABOVE_ALL)
            return call.selection
        values, indices, threshold, looked_at = call.selection
        smallest = threshold.view(torch.int32).fill_(ABOVE_ALL - 1)
        arguments = [*call.accumulate, u32(k_c), u32(chunk)]
        arguments += [pointer(values), pointer(indices), pointer(smallest)]
        call.launch(call.module, "chunked", -(-n // chunk), THREADS, arguments)
        looked_at.fill_(n)
        return call.selection

    def scatter_add_(self, out: Tensor, indices: Tensor, values: Tensor) -> None:
        k = indices.numel()
        if k:
            grid = min(-(-k // THREADS), BLOCKS_PER_PROCESSOR * 8 * self.launcher.processors(out.device))
            arguments: list[Argument] = [pointer(out), u32(out.numel())]
            arguments += [pointer(indices), pointer(values), u32(k)]
            self.launcher.launch(SELECT, "scatter_add", grid, THREADS, arguments, out.device)


class _Call:
    """Memory and arguments of one selection."""

    def __init__(
        self, launcher: Launcher, residual: Tensor, accumulation: Accumulation | None, k: int, capacity: int
    ) -> None:
        if residual.numel() > MAX_ELEMENTS:
            raise ValueError(f"residual must have at most {MAX_ELEMENTS} elements on CUDA, got {residual.numel()}")
        self.launcher, self.device = launcher, residual.device
        self.n, self.k, self.capacity = residual.numel(), k, capacity
        self.grid = BLOCKS_PER_PROCESSOR * launcher.processors(self.device)
        self.has_grad = accumulation is not None
        velocity = accumulation.velocity if accumulation is not None else None
        self.module = accumulating(accumulation.grad.dtype if accumulation else torch.float32, velocity is not None)
        self.selection = Selection(
            torch.empty(k, device=self.device),
            torch.empty(k, dtype=torch.int32, device=self.device),
            torch.full((), torch.inf, device=self.device),
            torch.zeros((), dtype=torch.int64, device=self.device),
        )
        # Zeroed together: the state, and one word a tile for each of the two look-backs. Candidates need no zeroing.
        tiles = -(-self.n // TILE)
        self.workspace = torch.zeros(STATE_BYTES // 8 + 2 * tiles, dtype=torch.int64, device=self.device)
        self.candidates = torch.empty((3 if velocity is not None else 2) * capacity, device=self.device)
        base, work = self.candidates.data_ptr(), self.workspace.data_ptr()
        self.state = address(work)
        self.stream_tiles, self.emit_tiles = address(work + STATE_BYTES), address(work + STATE_BYTES + 8 * tiles)
        buffers = [address(base + 4 * capacity * i) for i in range(2)]
        buffers.append(address(base + 8 * capacity if velocity is not None else 0))
        self.buffers = buffers
        pointers = [pointer(residual), pointer(accumulation.grad) if accumulation else address(0)]
        pointers.append(pointer(velocity) if velocity is not None else address(0))
        aligned = all(int(p) % 16 == 0 for p in pointers)
        decay = accumulation.decay if accumulation else 1.0
        momentum = (accumulation.momentum or 0.0) if accumulation else 0.0
        self.accumulate: list[Argument] = [*pointers, np.float32(decay), np.float32(momentum)]
        self.accumulate += [u32(self.n), u32(aligned)]
        self.residual, self.velocity = pointers[0], pointers[2]

    def launch(self, module: Module, kernel: str, grid: int, block: int, arguments: Sequence[Argument]) -> None:
        if grid:
            self.launcher.launch(module, kernel, grid, block, arguments, self.device)

    def stream(self, guess: int | None) -> None:
        """Accumulate and collect candidates; None samples the guess. Does nothing without a gradient."""
        if not self.has_grad or self.n == 0:
            return
        if guess is None and self.n > 2 * SAMPLES:
            share = SAMPLES * self.k / self.n
            rank = min(SAMPLES, int(share + 3 * share**0.5 + 1))
            self.launch(self.module, "sample", 1, SAMPLE_THREADS, [*self.accumulate, self.state, u32(rank)])
        elif guess:
            self.workspace[:1].fill_(guess)  # the state's first word; a short vector's guess is 0: all are candidates
        arguments = [*self.accumulate, self.state, self.stream_tiles, *self.buffers, u32(self.capacity)]
        self.launch(self.module, "stream", -(-self.n // TILE), THREADS, arguments)

    def select(self, bits: int, seed: int | None) -> Selection:
        """Settle the leading bits of the k-th key, LEVEL_BITS a pass, and emit; ``seed`` None takes ties in order."""
        common: list[Argument] = [self.residual, self.velocity, *self.buffers]
        common += [u32(self.n), u32(self.k), u32(self.capacity), u32(bits)]
        if self.has_grad:
            self.launch(SELECT, "put_back", self.grid, THREADS, [*common, self.state])
        settled = 0
        while settled < bits:
            width = min(LEVEL_BITS if settled == 0 else LEVEL_BITS - 1, bits - settled)
            settled += width
            level: list[Argument] = [*common, self.state, u32(EXACT_BITS - settled), u32(width)]
            self.launch(SELECT, "count_level", self.grid, THREADS, level)
        values, indices, threshold, looked_at = (pointer(t) for t in self.selection)
        how: list[Argument] = [self.state, self.emit_tiles, np.uint64(seed or 0), u32(seed is None)]
        self.launch(SELECT, "emit", self.grid, THREADS, [*common, *how, values, indices, threshold, looked_at])
        return self.selection
