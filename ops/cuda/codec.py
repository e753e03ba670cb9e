"""The codecs on CUDA: which kernels run in which order. Nothing is read back, so the host never waits."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import BLOCK, VALUE_BITS, IndexLayout, scale_bytes
from ..types import Decoded
from .launch import THREADS, Argument, Launcher, Module, pointer, u32

CODEC = Module(("device.cuh", "indices.cu", "values.cu"))
BIT_TILE = THREADS * 32  # as in indices.cu


class CudaCodec:
    """The codecs of :class:`ops.types.Tier` over a launcher."""

    launcher: Launcher

    def encode_indices(self, indices: Tensor, layout: IndexLayout, out: Tensor) -> None:
        """1. fields, one thread a word  2. the vector of bits, one thread an index, into zeroed words."""
        code, vector = _code(layout), out[layout.field_bytes :]
        if words := layout.field_bytes // 4:
            self._launch("write_fields", words, out, pointer(indices), *code, pointer(out), u32(words))
        if layout.bits:
            vector.zero_()
            self._launch("write_bits", layout.k, out, pointer(indices), *code, pointer(vector))

    def decode_indices(self, encoded: Tensor, layout: IndexLayout) -> Decoded:
        """1. fields, or bits and the fields of each  2. check the order  3. replace them where anything was wrong."""
        indices = torch.empty(layout.k, dtype=torch.int32, device=encoded.device)
        tiles = -(-layout.bits // BIT_TILE)
        # Zeroed together: the ticket, the flag and one word a tile for the look-back.
        workspace = torch.zeros(1 + tiles, dtype=torch.int64, device=encoded.device)
        ticket, corrupt = workspace.view(torch.int32)[:2]
        code, into, flag = _code(layout), pointer(indices), pointer(corrupt)
        if layout.bits:
            source = [pointer(encoded), pointer(encoded[layout.field_bytes :])]
            scan = [pointer(ticket), pointer(workspace[1:])]
            self._launch("read_bits", tiles * THREADS, encoded, *source, *code, *scan, into, flag)
        else:
            self._launch("read_fields", layout.k, encoded, pointer(encoded), *code, into, flag)
        self._launch("check_indices", layout.k, encoded, into, u32(layout.k), u32(layout.n), flag)
        self._launch("replace_corrupt", layout.k, encoded, into, u32(layout.k), flag)
        return Decoded(indices, corrupt)

    def encode_values_(self, values: Tensor, dtype: str, out: Tensor) -> None:
        k, source = values.numel(), pointer(values)
        if dtype == "fp32":
            out.copy_(values.view(torch.uint8))
            values.zero_()
        elif dtype in ("bf16", "fp16"):
            self._launch("encode_halves", -(-k // 2), out, source, u32(k), u32(dtype == "fp16"), pointer(out))
        else:
            width, codes = u32(VALUE_BITS[dtype]), pointer(out[scale_bytes(dtype, k) :])
            self._launch("encode_scaled", -(-k // BLOCK) * 32, out, source, u32(k), width, pointer(out), codes)

    def decode_values(self, encoded: Tensor, k: int, dtype: str) -> Tensor:
        if dtype == "fp32":
            return encoded.view(torch.float32).clone()
        values, source = torch.empty(k, device=encoded.device), pointer(encoded)
        if dtype in ("bf16", "fp16"):
            self._launch("decode_halves", k, encoded, source, u32(k), u32(dtype == "fp16"), pointer(values))
        else:
            width, codes = u32(VALUE_BITS[dtype]), pointer(encoded[scale_bytes(dtype, k) :])
            self._launch("decode_scaled", k, encoded, source, codes, u32(k), width, pointer(values))
        return values

    def _launch(self, kernel: str, threads: int, on: Tensor, *arguments: Argument) -> None:
        """One kernel with at least so many threads; none, when there is nothing to do."""
        if threads:
            self.launcher.launch(CODEC, kernel, -(-threads // THREADS), THREADS, arguments, on.device)


def _code(layout: IndexLayout) -> list[Argument]:
    """struct Code of indices.cu."""
    step = int(layout.encoding == "elias_fano")
    return [u32(x) for x in (layout.k, layout.n, layout.width, layout.bits, step, layout.k_c)]
