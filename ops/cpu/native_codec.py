"""The compiled codecs; codec_indices.h and codec_values.h say how they work."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..layout import INDEX_ENCODINGS, VALUE_BITS, IndexLayout
from ..reference_codec import invalid_indices
from ..types import Decoded

ISA_NAMES = ("generic", "sse2", "avx2", "avx512")  # the order of the table in variants.h
_VALUE_TYPES = tuple(VALUE_BITS)  # the order of enum ValueType
_SLACK = 64  # indices that the decoder may write behind the k-th


class _Layout(ctypes.Structure):
    """struct IndexLayout of codec_indices.h, field by field."""

    _fields_ = [
        ("k", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("bits", ctypes.c_int64),
        ("width", ctypes.c_int32),
        ("k_c", ctypes.c_int32),
        ("encoding", ctypes.c_int32),
    ]

    @classmethod
    def of(cls, layout: IndexLayout) -> _Layout:
        encoding = INDEX_ENCODINGS.index(layout.encoding)
        return cls(layout.k, layout.n, layout.bits, layout.width, layout.k_c, encoding)


class NativeCodec:
    """The codecs of :class:`ops.types.Tier`, on the caller's thread."""

    library: ctypes.CDLL
    isa: str

    def encode_indices(self, indices: Tensor, layout: IndexLayout, out: Tensor) -> None:
        if self.library.dss_encode_indices(ctypes.byref(_Layout.of(layout)), indices.data_ptr(), out.data_ptr()):
            raise ValueError(invalid_indices(layout))

    def decode_indices(self, encoded: Tensor, layout: IndexLayout) -> Decoded:
        indices = torch.empty(layout.k + _SLACK, dtype=torch.int32)
        corrupt = self.library.dss_decode_indices(
            ctypes.byref(_Layout.of(layout)), encoded.data_ptr(), indices.data_ptr()
        )
        return Decoded(indices[: layout.k], torch.tensor(corrupt, dtype=torch.int32))

    def encode_values_(self, values: Tensor, dtype: str, out: Tensor) -> None:
        isa, type_ = ISA_NAMES.index(self.isa), _VALUE_TYPES.index(dtype)
        self.library.dss_encode_values(isa, type_, values.numel(), values.data_ptr(), out.data_ptr())

    def decode_values(self, encoded: Tensor, k: int, dtype: str) -> Tensor:
        values = torch.empty(k)
        isa, type_ = ISA_NAMES.index(self.isa), _VALUE_TYPES.index(dtype)
        self.library.dss_decode_values(isa, type_, k, encoded.data_ptr(), values.data_ptr())
        return values


def declare_codec(library: ctypes.CDLL) -> None:
    """The codecs' argument types."""
    pointer, count, layout = ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(_Layout)
    for call in (library.dss_encode_indices, library.dss_decode_indices):
        call.restype, call.argtypes = ctypes.c_int, [layout, pointer, pointer]
    for call in (library.dss_encode_values, library.dss_decode_values):
        call.restype, call.argtypes = None, [ctypes.c_int, ctypes.c_int, count, pointer, pointer]
