"""The compiled CPU tier: one streaming pass in C++, loaded by ctypes; selector.h says how it works."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..types import MAGNITUDE_MASK, Accumulation, Selection, chunked_count
from .native_codec import ISA_NAMES, NativeCodec, declare_codec

_SOURCES = {None: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_SAMPLE_IT = MAGNITUDE_MASK + 2  # a guess above every key and above "none": the library samples one
_EXACT_BITS = 31
# Waking another thread costs as much as streaming some hundred thousand elements: each thread gets at least so many.
_ELEMENTS_PER_THREAD = 2 << 20


class _Step(ctypes.Structure):
    """struct Step of common.h, field by field."""

    _fields_ = [
        ("residual", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("velocity", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("indices", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("candidates", ctypes.c_int64),
        ("decay", ctypes.c_float),
        ("momentum", ctypes.c_float),
        ("source", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("isa", ctypes.c_int32),
        ("samplings", ctypes.c_int32),
        ("take_first", ctypes.c_int32),
        ("chunk", ctypes.c_int32),
        ("guess", ctypes.c_uint32),
        ("threshold", ctypes.c_uint32),
    ]


@dataclass
class NativeTier(NativeCodec):
    """The library and the instruction set in use. ``guess`` and ``threads`` change the speed and never the result."""

    library: ctypes.CDLL
    isa: str
    threads: int | None = None  # None: follow torch.get_num_threads(), fewer for short vectors
    guess: int | None = None  # key of the first threshold tried; None: sample it

    @property
    def variants(self) -> list[str]:
        """Instruction sets that this processor can run, slowest first."""
        return [name for i, name in enumerate(ISA_NAMES) if self.library.dss_variant(i)]

    def topk_(self, residual: Tensor, accumulation: Accumulation | None, k: int) -> Selection:
        step, selection = self._prepare(residual, accumulation, k, k)
        step.samplings, step.take_first = _EXACT_BITS, 1
        return self._run(self.library.dss_select, step, selection)

    def mstopk_(
        self, residual: Tensor, accumulation: Accumulation | None, k: int, samplings: int, seed: int
    ) -> Selection:
        step, selection = self._prepare(residual, accumulation, k, k)
        step.samplings, step.seed = min(samplings, _EXACT_BITS), seed
        return self._run(self.library.dss_select, step, selection)

    def chunked_topk_(self, residual: Tensor, accumulation: Accumulation | None, k_c: int, chunk: int) -> Selection:
        emitted = chunked_count(residual.numel(), k_c, chunk)
        step, selection = self._prepare(residual, accumulation, k_c if emitted else 0, emitted)
        step.chunk = chunk
        return self._run(self.library.dss_select_chunked, step, selection)

    def scatter_add_(self, out: Tensor, indices: Tensor, values: Tensor) -> None:
        k = indices.numel()
        status = self.library.dss_scatter_add(
            out.data_ptr(), out.numel(), indices.data_ptr(), values.data_ptr(), k, self._threads_for(k * 8)
        )
        if status:
            raise ValueError(f"indices must ascend strictly within 0..{out.numel() - 1}; nothing was added")

    def _threads_for(self, n: int) -> int:
        if self.threads is not None:
            return self.threads
        return max(1, min(torch.get_num_threads(), n // _ELEMENTS_PER_THREAD))

    def _prepare(
        self, residual: Tensor, accumulation: Accumulation | None, k: int, emitted: int
    ) -> tuple[_Step, Selection]:
        # One allocation for both: large enough blocks go back to the system when freed, and mapping new pages would
        # cost more than writing them.
        payload = torch.empty(2 * emitted)
        selection = Selection(
            payload[:emitted],
            payload[emitted:].view(torch.int32),
            torch.full((), torch.inf),
            torch.zeros((), dtype=torch.int64),
        )
        step = _Step(
            residual=residual.data_ptr(),
            values=selection.values.data_ptr(),
            indices=selection.indices.data_ptr(),
            n=residual.numel(),
            k=k,
            decay=1.0,
            threads=self._threads_for(residual.numel()),
            isa=ISA_NAMES.index(self.isa),
            guess=_SAMPLE_IT if self.guess is None else self.guess,
        )
        if accumulation is not None:
            step.grad, step.source = accumulation.grad.data_ptr(), _SOURCES[accumulation.grad.dtype]
            step.decay = accumulation.decay
            if accumulation.velocity is not None:
                step.velocity, step.momentum = accumulation.velocity.data_ptr(), accumulation.momentum or 0.0
        return step, selection

    def _run(self, call: ctypes._NamedFuncPointer, step: _Step, selection: Selection) -> Selection:
        nothing_to_emit = step.k == 0
        if nothing_to_emit:
            if step.n == 0:
                return selection
            # The pass still has to accumulate; a first guess above every key makes it emit nothing.
            step.guess = MAGNITUDE_MASK + 1
            call = self.library.dss_select
        if call(ctypes.byref(step)) != 0:
            raise MemoryError(f"no memory for the candidates of {step.n} elements; the residual is no longer valid")
        if not nothing_to_emit:
            selection.threshold.view(torch.int32).fill_(step.threshold)
        selection.candidates.fill_(step.candidates)
        return selection


def load(path: Path, isa: str | None = None) -> NativeTier:
    """Load the library; ``isa`` None takes $DS_SPARSE_CPU_ISA, else the widest that the processor can run.

    Raises:
        OSError: when the library cannot be loaded here.
        ValueError: for an instruction set that this processor does not have.
    """
    library = ctypes.CDLL(os.fspath(path))
    library.dss_variant.restype, library.dss_variant.argtypes = ctypes.c_char_p, [ctypes.c_int]
    library.dss_step_bytes.restype = ctypes.c_int64
    for call in (library.dss_select, library.dss_select_chunked):
        call.restype, call.argtypes = ctypes.c_int, [ctypes.POINTER(_Step)]
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    library.dss_scatter_add.restype = ctypes.c_int
    library.dss_scatter_add.argtypes = [pointer, count, pointer, pointer, count, ctypes.c_int]
    declare_codec(library)
    if library.dss_step_bytes() != ctypes.sizeof(_Step):
        raise OSError(f"{path} was built from other sources: its Step has {library.dss_step_bytes()} bytes")
    tier = NativeTier(library, "generic")
    wanted = isa or os.environ.get("DS_SPARSE_CPU_ISA") or tier.variants[-1]
    if wanted not in tier.variants:
        raise ValueError(f"instruction set must be one of {', '.join(tier.variants)} on this processor, got {wanted!r}")
    tier.isa = wanted
    return tier
