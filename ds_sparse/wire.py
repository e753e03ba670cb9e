"""How a payload becomes bytes, and back.

A message holds, in this order, each part padded with zeros to a multiple of 4 bytes,

    header    24 bytes: "ds", version u8, value dtype u8, index encoding u16, k_c u16, step u32, k u32, n u32, and the
              CRC-32 of these 20 bytes; little-endian
    values    in the value dtype; block-quantized ones behind the scales of their blocks
    indices   encoded; absent when the payload is shared

The length follows from the payload's form, which all peers know: no lengths are exchanged. docs/kernels.md has the
layout of values and indices to the bit.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import torch

from . import ops
from .errors import WireError
from .payload import Form, Payload

VERSION = 1
_FIELDS = struct.Struct("<2sBBHHIII")
HEADER_BYTES = _FIELDS.size + 4
_FIELD_NAMES = ("mark", "version", "value dtype", "index encoding", "entries per chunk", "step", "count", "numel")
INDEX_ENCODINGS = ("int32", "elias_fano", "bitmap", "chunk12")
VALUE_DTYPES = ("fp32", "bf16", "fp16", "int8", "int4", "int2")


class Wire:
    """Encodes and decodes messages.

    Args:
        value_dtype: of `VALUE_DTYPES`.
        index_encoding: of `INDEX_ENCODINGS`, or "smallest" to take the shortest one by formula.
    """

    def __init__(self, value_dtype: str, index_encoding: str) -> None:
        self._dtype = value_dtype
        self._candidates = INDEX_ENCODINGS if index_encoding == "smallest" else (index_encoding,)

    @property
    def exact(self) -> bool:
        """Whether values arrive as they were sent."""
        return self._dtype == "fp32"

    def index_encoding(self, form: Form) -> str:
        """The encoding in use; of equally short ones the first."""
        usable = [name for name in self._candidates if name != "chunk12" or form.k_c is not None]
        return min(usable, key=lambda name: ops.index_bytes(name, form.k, form.numel, form.k_c))

    def message_bytes(self, form: Form) -> int:
        """Length of a message without building it."""
        return HEADER_BYTES + ops.value_bytes(self._dtype, form.k) + self._index_bytes(form)

    def encode_(self, payload: Payload, step: int) -> torch.Tensor:
        """The message uint8 [message_bytes] for `payload`, whose values become what rounding lost of them."""
        form, values = payload.form, payload.values
        message = torch.empty(self.message_bytes(form), dtype=torch.uint8, device=values.device)
        header, value_part, index_part = self._split(message, form)
        header.copy_(self._header(form, step))
        ops.encode_values_(values, self._dtype, out=value_part)
        if not form.shared:
            ops.encode_indices(payload.indices, form.numel, self.index_encoding(form), k_c=form.k_c, out=index_part)
        return message

    def decode(
        self, messages: Sequence[torch.Tensor], forms: Sequence[Form], step: int, shared: torch.Tensor | None = None
    ) -> list[Payload]:
        """The payloads of one message from each peer.

        Args:
            messages: uint8, in the order of the peers.
            forms: what each peer was to send.
            step: at which it was to send it.
            shared: the indices int32 [k] of payloads whose form is shared.

        Raises:
            WireError: a message is not what its peer was to send. Whatever the bytes are, nothing is read or written
                outside of the message and of its payload.
        """
        payloads, faults = [], []
        for peer, (message, form) in enumerate(zip(messages, forms, strict=True)):
            if message.numel() != self.message_bytes(form):
                raise WireError(
                    f"the message of node {peer} at step {step} has {message.numel()} bytes instead of "
                    f"{self.message_bytes(form)}: it was truncated, or the nodes do not run the same configuration"
                )
            payload, fault = self._decode_one(message, form, step, shared)
            payloads.append(payload)
            faults.append(fault)
        if faults and (faulty := torch.stack(faults).nonzero().flatten().tolist()):  # the one wait for the device
            peer = faulty[0]
            raise WireError(self._explain(peer, messages[peer], forms[peer], step))
        return payloads

    def _decode_one(
        self, message: torch.Tensor, form: Form, step: int, shared: torch.Tensor | None
    ) -> tuple[Payload, torch.Tensor]:
        """A payload, and a bool [] that says whether anything was wrong with the message."""
        header, value_part, index_part = self._split(message, form)
        fault = (header != self._header(form, step).to(header.device)).any()
        values = ops.decode_values(value_part, form.k, self._dtype)
        if form.shared:
            assert shared is not None
            return Payload(values, shared, form), fault
        decoded = ops.decode_indices(index_part, form.k, form.numel, self.index_encoding(form), k_c=form.k_c)
        return Payload(values, decoded.indices, form), fault | (decoded.corrupt != 0)

    def _split(self, message: torch.Tensor, form: Form) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Header, values and indices of a message, as views."""
        middle = HEADER_BYTES + ops.value_bytes(self._dtype, form.k)
        return message[:HEADER_BYTES], message[HEADER_BYTES:middle], message[middle:]

    def _index_bytes(self, form: Form) -> int:
        return 0 if form.shared else ops.index_bytes(self.index_encoding(form), form.k, form.numel, form.k_c)

    def _fields(self, form: Form, step: int) -> tuple[bytes | int, ...]:
        encoding = 0 if form.shared else 1 + INDEX_ENCODINGS.index(self.index_encoding(form))
        return (
            b"ds", VERSION, VALUE_DTYPES.index(self._dtype), encoding, form.k_c or 0, step & 0xFFFFFFFF, form.k,
            form.numel,
        )  # fmt: skip

    def _header(self, form: Form, step: int) -> torch.Tensor:
        fields = _FIELDS.pack(*self._fields(form, step))
        return torch.frombuffer(bytearray(fields + struct.pack("<I", zlib.crc32(fields))), dtype=torch.uint8)

    def _explain(self, peer: int, message: torch.Tensor, form: Form, step: int) -> str:
        """What is wrong with a message."""
        start = f"the message of node {peer} at step {step}"
        header = message[:HEADER_BYTES].cpu().numpy().tobytes()
        fields, checksum = header[: _FIELDS.size], header[_FIELDS.size :]
        if struct.pack("<I", zlib.crc32(fields)) != checksum:
            return f"{start} is damaged: the checksum of its header does not fit"
        for name, got, expected in zip(_FIELD_NAMES, _FIELDS.unpack(fields), self._fields(form, step), strict=True):
            if got != expected:
                found = f"{_name(name, got)} instead of {_name(name, expected)}"
                return f"{start} has {name} {found}: the nodes are out of step or differ in setup"
        return f"{start} is damaged: its indices do not ascend within {form.numel} entries"


def _name(field: str, code: bytes | int) -> str:
    """What a field of the header says, in words where there are any."""
    words = {"value dtype": VALUE_DTYPES, "index encoding": ("none", *INDEX_ENCODINGS)}.get(field, ())
    return words[code] if isinstance(code, int) and code < len(words) else repr(code)
