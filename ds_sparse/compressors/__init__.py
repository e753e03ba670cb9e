"""Compressors, one file each. A new one joins by a file and a row here."""

from __future__ import annotations

from collections.abc import Callable

from ..config import CompressorSettings
from .base import Accumulation, Compressor, Quota
from .chunked_topk import ChunkedTopK
from .identity import Identity
from .mstopk import MSTopK
from .randomk import RandomK
from .topk import TopK

COMPRESSORS: dict[str, Callable[[CompressorSettings], Compressor]] = {
    "mstopk": lambda settings: TopK() if settings.samplings is None else MSTopK(settings.samplings, settings.seed),
    "topk": lambda settings: TopK(),
    "chunked_topk": lambda settings: ChunkedTopK(),
    "randomk": lambda settings: RandomK(settings.seed),
    "identity": lambda settings: Identity(),
}


def build_compressor(settings: CompressorSettings) -> Compressor:
    return COMPRESSORS[settings.type](settings)


__all__ = [
    "COMPRESSORS", "Accumulation", "ChunkedTopK", "Compressor", "Identity", "MSTopK", "Quota", "RandomK", "TopK",
    "build_compressor",
]  # fmt: skip
