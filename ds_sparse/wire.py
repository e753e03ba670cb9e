"""How a payload becomes bytes.

A message holds, in this order,

    values of the payload       fp32 [k]
    values of excluded entries  fp32 [dense_numel]
    indices of the payload      encoded; absent when the payload is shared
    zeros                       up to a multiple of 4 bytes

so that values are aligned, also where many messages stand behind each other. The length follows from k, n and
dense_numel alone, which all peers know: no lengths are exchanged, and messages of one step are equally long on all
peers.

Index encodings, in bytes for k ascending indices below n:

    int32        4 k
    elias_fano   k low bits of floor(log2(n/k)) each, then the high parts in unary: at most 2 + log2(n/k) bits an index
    bitmap       n/8
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from .payload import Payload


class IndexEncoding(NamedTuple):
    """One way to write ascending indices. Sizes are bytes; `encode` and `decode` take (indices or bytes, k, n)."""

    size: Callable[[int, int], int]
    encode: Callable[[torch.Tensor, int, int], torch.Tensor]
    decode: Callable[[torch.Tensor, int, int], torch.Tensor]


class Wire:
    """Encodes and decodes messages.

    Args:
        index_encoding: a key of `INDEX_ENCODINGS`, or "smallest" to take the shortest one by formula.
    """

    def __init__(self, index_encoding: str) -> None:
        self._candidates = list(INDEX_ENCODINGS) if index_encoding == "smallest" else [index_encoding]

    def index_encoding(self, k: int, n: int) -> str:
        """The encoding in use for k of n indices; of equally short ones the first."""
        return min(self._candidates, key=lambda name: INDEX_ENCODINGS[name].size(k, n))

    def message_bytes(self, k: int, n: int, dense_numel: int, *, shared: bool) -> int:
        """Length of a message without building it."""
        index_bytes = 0 if shared else INDEX_ENCODINGS[self.index_encoding(k, n)].size(k, n)
        return 4 * (k + dense_numel + -(-index_bytes // 4))

    def encode(self, payload: Payload, dense: torch.Tensor) -> torch.Tensor:
        """The message uint8 [message_bytes] for `payload` and the excluded entries `dense` fp32 [dense_numel]."""
        parts = [payload.values.view(torch.uint8), dense.contiguous().view(torch.uint8)]
        if not payload.shared:
            k = payload.values.numel()
            encoding = INDEX_ENCODINGS[self.index_encoding(k, payload.numel)]
            encoded = encoding.encode(payload.indices, k, payload.numel)
            parts.append(torch.nn.functional.pad(encoded, (0, -encoded.numel() % 4)))
        return torch.cat(parts)

    def decode(self, message: torch.Tensor, own: Payload) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Values fp32 [k], indices int32 [k] and excluded entries fp32 of a peer's message.

        Args:
            own: this rank's payload of the same step, which has the same k, n and `shared`.
        """
        k, n = own.values.numel(), own.numel
        if own.shared:
            floats = message.view(torch.float32)
            return floats[:k], own.indices, floats[k:]
        encoding = INDEX_ENCODINGS[self.index_encoding(k, n)]
        size = encoding.size(k, n)
        values_end = message.numel() - 4 * -(-size // 4)
        floats = message[:values_end].view(torch.float32)
        return floats[:k], encoding.decode(message[values_end : values_end + size], k, n), floats[k:]


def _low_bits(k: int, n: int) -> int:
    return max(0, int(math.log2(n / k))) if k else 0


def _elias_fano_sizes(k: int, n: int) -> tuple[int, int]:
    """Bytes of the low and of the high part."""
    if not k:
        return 0, 0
    low = _low_bits(k, n)
    return -(-k * low // 8), -(-(k + ((n - 1) >> low)) // 8)


def _elias_fano_encode(indices: torch.Tensor, k: int, n: int) -> torch.Tensor:
    if not k:
        return indices.new_empty(0, dtype=torch.uint8)
    low = _low_bits(k, n)
    # 1. Low parts: `low` bits of each index, most significant first.
    shifts = torch.arange(low - 1, -1, -1, device=indices.device, dtype=torch.int32)
    low_part = _pack_bits(((indices.unsqueeze(1) >> shifts) & 1).flatten())
    # 2. High parts: index i sets bit (high_i + i), which grows strictly.
    bits = torch.zeros(8 * _elias_fano_sizes(k, n)[1], dtype=torch.uint8, device=indices.device)
    bits[(indices >> low).long() + torch.arange(k, device=indices.device)] = 1
    return torch.cat([low_part, _pack_bits(bits)])


def _elias_fano_decode(encoded: torch.Tensor, k: int, n: int) -> torch.Tensor:
    if not k:
        return encoded.new_empty(0, dtype=torch.int32)
    low = _low_bits(k, n)
    low_bytes = _elias_fano_sizes(k, n)[0]
    positions = _unpack_bits(encoded[low_bytes:]).nonzero().flatten()
    high = (positions - torch.arange(k, device=encoded.device)).to(torch.int32) << low
    bits = _unpack_bits(encoded[:low_bytes])[: k * low].view(k, low).to(torch.int32)
    shifts = torch.arange(low - 1, -1, -1, device=encoded.device, dtype=torch.int32)
    return high + (bits << shifts).sum(dim=1, dtype=torch.int32)


def _bitmap_encode(indices: torch.Tensor, k: int, n: int) -> torch.Tensor:
    bits = torch.zeros(8 * (-(-n // 8)), dtype=torch.uint8, device=indices.device)
    bits[indices.long()] = 1
    return _pack_bits(bits)


def _bitmap_decode(encoded: torch.Tensor, k: int, n: int) -> torch.Tensor:
    return _unpack_bits(encoded).nonzero().flatten().to(torch.int32)


def _pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Integers in {0, 1} to bytes, first bit most significant; the last byte is filled with zeros."""
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.numel() % 8)).view(-1, 8)
    weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=bits.device)
    return (padded * weights).sum(dim=1, dtype=torch.uint8)


def _unpack_bits(packed: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(7, -1, -1, device=packed.device, dtype=torch.uint8)
    return ((packed.unsqueeze(1) >> shifts) & 1).flatten()


INDEX_ENCODINGS = {
    "int32": IndexEncoding(
        lambda k, n: 4 * k,
        lambda indices, k, n: indices.to(torch.int32).view(torch.uint8),
        lambda encoded, k, n: encoded.view(torch.int32),
    ),
    "elias_fano": IndexEncoding(lambda k, n: sum(_elias_fano_sizes(k, n)), _elias_fano_encode, _elias_fano_decode),
    "bitmap": IndexEncoding(lambda k, n: -(-n // 8), _bitmap_encode, _bitmap_decode),
}
