"""Messages: every payload comes back, in exactly as many bytes as were announced; any other bytes are refused."""

from __future__ import annotations

import ast
import math
import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ds_sparse
from ds_sparse import WireError, ops
from ds_sparse.payload import Form, Payload
from ds_sparse.wire import HEADER_BYTES, INDEX_ENCODINGS, VALUE_DTYPES, VERSION, Wire

ENCODINGS = [name for name in (*INDEX_ENCODINGS, "smallest") if name != "chunk12"]  # which needs a form of its own

# Index sets that break encoders: (indices, n).
ADVERSARIAL = {
    "nothing of nothing": ([], 0),
    "nothing": ([], 1000),
    "one of one": ([0], 1),
    "first": ([0], 1000),
    "last": ([999], 1000),
    "both ends": ([0, 999], 1000),
    "all": (range(1000), 1000),
    "all of a byte": (range(8), 8),
    "all but one": ([*range(500), *range(501, 1000)], 1000),
    "a run at the start": (range(100), 1000),
    "a run at the end": (range(900, 1000), 1000),  # all high parts are large
    "every other": (range(0, 1000, 2), 1000),
    "half, the upper one": (range(512, 1024), 1024),  # n/k = 2: one low bit
    "n/k just below a power of two": (range(0, 1023, 4), 1023),
    "n one above a power of two": ([0, 511, 512], 513),
    "the largest n there is": ([0, 1, 2**30, 2**31 - 2], 2**31 - 1),
    "one, far out": ([2**31 - 2], 2**31 - 1),
}


def payload_of(indices: list[int], n: int, seed: int = 0, *, k_c: int | None = None, shared: bool = False) -> Payload:
    """Values are random bit patterns: denormals, NaNs, both zeros and infinities among them."""
    bits = torch.randint(-(2**31), 2**31, (len(indices),), generator=torch.Generator().manual_seed(seed))
    values = bits.to(torch.int32).view(torch.float32)
    return Payload(values, torch.tensor(indices, dtype=torch.int32), Form(len(indices), n, shared, k_c))


def chunked(n: int, k_c: int, seed: int = 0) -> Payload:
    """k_c random indices of every chunk, of a last and shorter one at most as many."""
    generator, indices = torch.Generator().manual_seed(seed), []
    for start in range(0, n, ops.CHUNK):
        drawn = torch.randperm(min(ops.CHUNK, n - start), generator=generator)[:k_c]
        indices += (start + drawn.sort().values).tolist()
    return payload_of(indices, n, seed, k_c=k_c)


def random_payload(k: int, n: int, seed: int = 0) -> Payload:
    drawn = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:k]
    return payload_of(drawn.sort().values.tolist(), n, seed)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(torch.int32).tolist()


def encoded(wire: Wire, payload: Payload, step: int = 0) -> torch.Tensor:
    """A message; the payload keeps its values."""
    return wire.encode_(payload._replace(values=payload.values.clone()), step)


def assert_round_trip(wire: Wire, payload: Payload, step: int = 7) -> None:
    sent = payload._replace(values=payload.values.clone())
    message = wire.encode_(sent, step)
    assert message.dtype == torch.uint8
    assert message.numel() == wire.message_bytes(payload.form)
    assert message.numel() % 4 == 0  # a message behind this one has aligned parts
    (received,) = wire.decode([message], [payload.form], step, payload.indices if payload.form.shared else None)
    assert received.form == payload.form
    assert received.indices.dtype == torch.int32 and torch.equal(received.indices, payload.indices)
    if wire.exact:
        assert bits(received.values) == bits(payload.values)
        assert not any(bits(sent.values))  # nothing was lost: +0 everywhere
    else:
        torch.testing.assert_close(
            sent.values, payload.values - received.values, rtol=0, atol=0, equal_nan=True
        )  # what was lost is what is missing, to the bit


def affordable(encoding: str, case: str) -> bool:
    return encoding != "bitmap" or ADVERSARIAL[case][1] < 10**6  # a bitmap of 2^31 bits is 256 MiB


# ---- round trips ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding, case", [(e, c) for e in ENCODINGS for c in ADVERSARIAL if affordable(e, c)])
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_adversarial_index_sets_come_back(encoding: str, case: str, dtype: str) -> None:
    indices, n = ADVERSARIAL[case]
    assert_round_trip(Wire(dtype, encoding), payload_of(list(indices), n))


@pytest.mark.parametrize("encoding", ["chunk12", "smallest"])
@pytest.mark.parametrize("dtype", VALUE_DTYPES)
@pytest.mark.parametrize("n", [0, 1, 5, 4095, 4096, 4097, 8200])
@pytest.mark.parametrize("k_c", [1, 3, 4096])
def test_chunked_index_sets_come_back(encoding: str, dtype: str, n: int, k_c: int) -> None:
    assert_round_trip(Wire(dtype, encoding), chunked(n, k_c))


@st.composite
def index_sets(draw: st.DrawFn) -> tuple[list[int], int]:
    n = draw(st.integers(1, 700))
    mostly = draw(st.booleans())  # so that dense sets come up as often as sparse ones
    chosen = draw(st.sets(st.integers(0, n - 1), max_size=min(n, 60)))
    return sorted(set(range(n)) - chosen if mostly else chosen), n


@pytest.mark.parametrize("encoding", ENCODINGS)
@settings(deadline=None, max_examples=100)
@given(index_sets(), st.sampled_from(VALUE_DTYPES), st.integers(0, 2**31), st.integers(0, 2**33))
def test_any_index_set_comes_back(encoding: str, case: Any, dtype: str, seed: int, step: int) -> None:
    assert_round_trip(Wire(dtype, encoding), payload_of(*case, seed), step)


@pytest.mark.parametrize("encoding", [*ENCODINGS, "chunk12"])
@pytest.mark.parametrize("dtype", VALUE_DTYPES)
@pytest.mark.parametrize("k, n", [(0, 5), (1, 1), (3, 10), (200, 300)])
def test_a_shared_payload_sends_no_indices(encoding: str, dtype: str, k: int, n: int) -> None:
    payload, wire = payload_of(list(range(k)), n, shared=True), Wire(dtype, encoding)
    assert wire.message_bytes(payload.form) == HEADER_BYTES + ops.value_bytes(dtype, k)
    assert_round_trip(wire, payload)


def test_messages_of_several_peers_are_read_out_of_one_buffer() -> None:
    """As they stand after an all-gather; odd lengths, so that padding has to keep the second one aligned."""
    payloads = [payload_of([0, 4, 9], 11, seed=1), payload_of([2, 3, 10], 11, seed=2)]
    for encoding in ENCODINGS:
        wire = Wire("fp32", encoding)
        gathered = torch.stack([encoded(wire, payload, 3) for payload in payloads])
        received = wire.decode(list(gathered), [payload.form for payload in payloads], 3)
        for got, payload in zip(received, payloads, strict=True):
            assert bits(got.values) == bits(payload.values) and torch.equal(got.indices, payload.indices)


def test_messages_of_different_lengths_are_read_too() -> None:
    """As they stand after a deal: one buffer, a form for each peer, an empty one among them."""
    payloads, wire = [payload_of([1, 2], 9), payload_of([], 9), payload_of(list(range(8)), 9)], Wire("bf16", "smallest")
    messages = [encoded(wire, payload) for payload in payloads]
    slices = torch.cat(messages).split([message.numel() for message in messages])
    received = wire.decode(list(slices), [payload.form for payload in payloads], 0)
    assert [got.indices.tolist() for got in received] == [payload.indices.tolist() for payload in payloads]
    assert wire.decode([], [], 0) == []


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_messages_of_one_step_are_equally_long(encoding: str) -> None:
    """Peers never exchange lengths, so the length must not depend on which indices were taken."""
    sets = [list(range(40)), list(range(960, 1000)), list(range(0, 1000, 25))]
    lengths = {encoded(Wire("fp32", encoding), payload_of(indices, 1000)).numel() for indices in sets}
    assert len(lengths) == 1


def test_only_fp32_is_exact() -> None:
    """The control of the round trips: the other dtypes do lose something."""
    for dtype in VALUE_DTYPES:
        wire, values = Wire(dtype, "int32"), torch.linspace(0.1, 3.0, 7)
        wire.encode_(Payload(values, torch.arange(7, dtype=torch.int32), Form(7, 9)), 0)
        assert wire.exact is (dtype == "fp32") is not bool(values.any())


# ---- the bytes themselves ---------------------------------------------------------------------------------------


def header(*fields: Any) -> bytes:
    """Packed as the module says, with its checksum."""
    packed = struct.pack("<2sBBHHIII", *fields)
    return packed + struct.pack("<I", zlib.crc32(packed))


def test_a_message_by_hand() -> None:
    """Nothing but the header, the values and the indices: no object is pickled, no length sent along."""
    payload = Payload(torch.tensor([1.0, -2.0]), torch.tensor([3, 258], dtype=torch.int32), Form(2, 300))
    assert bytes(encoded(Wire("fp32", "int32"), payload, step=5).tolist()) == (
        header(b"ds", VERSION, 0, 1, 0, 5, 2, 300) + struct.pack("<2f", 1.0, -2.0) + struct.pack("<2i", 3, 258)
    )
    assert bytes(encoded(Wire("bf16", "bitmap"), payload, step=2**32 + 6).tolist()) == (
        header(b"ds", VERSION, 1, 3, 0, 6, 2, 300)
        + bytes([0x80, 0x3F, 0x00, 0xC0])  # the upper halves of 1.0 and -2.0
        + ((1 << 3) + (1 << 258)).to_bytes(40, "little")
    )
    one_chunk = Payload(torch.tensor([1.0, -2.0]), payload.indices, Form(2, 300, k_c=2))
    assert bytes(encoded(Wire("fp32", "chunk12"), one_chunk).tolist()) == (
        header(b"ds", VERSION, 0, 4, 2, 0, 2, 300)
        + struct.pack("<2f", 1.0, -2.0)
        + (3 + (258 << 12)).to_bytes(4, "little")
    )


def test_nothing_that_reads_messages_can_unpickle() -> None:
    """A pickle from a peer is code from a peer."""
    root = Path(ds_sparse.__file__).parent
    files = [root / "wire.py", root / "links.py", *sorted((root / "exchange").glob("*.py"))]
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names |= {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
        assert not [name for name in names if "pickle" in name or name.endswith("_object") or name == "load"], file
    assert len(files) >= 6


# ---- what is refused --------------------------------------------------------------------------------------------


class Fault(NamedTuple):
    """A message that peer 1 sent by `sent`, and that is read by `read`."""

    said: str
    sent: tuple[Wire, Payload, int]
    read: tuple[Wire, Form, int]


def fault(said: str, form: Form, other: Form | None = None, **changed: Any) -> Fault:
    """Read at step 7 as bf16 values and `form`; what was changed at the sender."""
    wires = [Wire(given.get("dtype", "bf16"), given.get("encoding", "bitmap")) for given in ({}, changed)]
    sent = other or form
    payload = payload_of(list(range(sent.k)), sent.numel, k_c=sent.k_c, shared=sent.shared)
    return Fault(said, (wires[1], payload, changed.get("step", 7)), (wires[0], form, 7))


FAULTS = {
    "step": fault("has step 6 instead of 7", Form(8, 256), step=6),
    "dtype": fault("has value dtype fp16 instead of bf16", Form(8, 256), dtype="fp16"),
    "encoding": fault("has index encoding int32 instead of bitmap", Form(8, 256), encoding="int32"),  # 32 bytes both
    "count": fault("has count 7 instead of 8", Form(8, 256), Form(7, 256)),
    "numel": fault("has numel 250 instead of 256", Form(8, 256), Form(8, 250)),
    "per chunk": fault("has entries per chunk 6 instead of 5", Form(5, 5, k_c=5), Form(5, 5, k_c=6)),
    "shared": fault("has index encoding none instead of bitmap", Form(0, 0), Form(0, 0, shared=True)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_message_of_another_setup_is_named_with_what_differs(name: str) -> None:
    said, (sender, payload, step), (reader, form, expected) = FAULTS[name]
    sound = encoded(reader, payload_of(list(range(form.k)), form.numel, k_c=form.k_c), expected)
    with pytest.raises(WireError) as error:
        reader.decode([sound, encoded(sender, payload, step)], [form, form], expected)
    start = f"the message of node 1 at step 7 {said}"
    assert str(error.value) == f"{start}: the nodes are out of step or differ in setup"


@pytest.mark.parametrize(
    "fields, said", [((b"xs", VERSION), "mark b'xs' instead of b'ds'"), ((b"ds", 9), f"version 9 instead of {VERSION}")]
)
def test_a_message_of_another_make_is_named(fields: tuple[bytes, int], said: str) -> None:
    wire, payload = Wire("fp32", "int32"), payload_of([2, 3], 9)
    message = encoded(wire, payload)
    message[:HEADER_BYTES] = torch.tensor(list(header(*fields, 0, 1, 0, 0, 2, 9)), dtype=torch.uint8)
    with pytest.raises(WireError, match=f"node 0 at step 0 has {said}"):
        wire.decode([message], [payload.form], 0)


@pytest.mark.parametrize("change", [-4, -1, 1, 4, None])
def test_a_message_of_the_wrong_length_is_refused(change: int | None) -> None:
    wire, payload = Wire("fp32", "int32"), payload_of([2, 3], 9)
    message = encoded(wire, payload, 4)
    length = 0 if change is None else message.numel() + change
    wrong = torch.cat([message, message])[:length]
    with pytest.raises(WireError) as error:
        wire.decode([message, wrong], [payload.form] * 2, 4)
    said = f"the message of node 1 at step 4 has {length} bytes instead of 40: it was truncated, or the nodes do not"
    assert str(error.value) == f"{said} run the same configuration"


@pytest.mark.parametrize("byte", range(HEADER_BYTES))
def test_a_damaged_header_is_refused(byte: int) -> None:
    wire, payload = Wire("fp32", "int32"), payload_of([2, 3], 9)
    message = encoded(wire, payload, 4)
    message[byte] ^= 0x10
    with pytest.raises(WireError) as error:
        wire.decode([message], [payload.form], 4)
    said = "the message of node 0 at step 4 is damaged: the checksum of its header does not fit"
    assert str(error.value) == said


@pytest.mark.parametrize("indices", [[3, 3], [4, 2], [0, 9], [-1, 2], [2, 2**31 - 1]])
def test_indices_that_do_not_ascend_within_the_shard_are_refused(indices: list[int]) -> None:
    wire, payload = Wire("fp32", "int32"), payload_of([2, 3], 9)
    message = encoded(wire, payload, 4)
    message[-8:] = torch.tensor(indices, dtype=torch.int32).view(torch.uint8)
    with pytest.raises(WireError) as error:
        wire.decode([message], [payload.form], 4)
    said = "the message of node 0 at step 4 is damaged: its indices do not ascend within 9 entries"
    assert str(error.value) == said


@st.composite
def mutated(draw: st.DrawFn) -> tuple[Wire, Payload, torch.Tensor]:
    """A message of any kind, with some bytes flipped or overwritten, or of another length."""
    dtype = draw(st.sampled_from(VALUE_DTYPES))
    n, seed = draw(st.integers(0, 5000)), draw(st.integers(0, 99))
    if draw(st.booleans()):
        wire, payload = Wire(dtype, draw(st.sampled_from(["chunk12", "smallest"]))), chunked(n, draw(st.integers(1, 9)))
    else:
        wire, payload = Wire(dtype, draw(st.sampled_from(ENCODINGS))), random_payload(draw(st.integers(0, 40)), n, seed)
    message = encoded(wire, payload, 7)
    first = draw(st.sampled_from([0, HEADER_BYTES, message.numel() - ops.index_bytes(*_layout(wire, payload))]))
    for _ in range(draw(st.integers(0, 6))):
        place = draw(st.integers(min(first, message.numel() - 1), message.numel() - 1))
        message[place] = draw(st.sampled_from([0, 0xFF, int(message[place]) ^ (1 << draw(st.integers(0, 7)))]))
    return wire, payload, message[: draw(st.integers(0, message.numel()))] if draw(st.integers(0, 9)) == 0 else message


def _layout(wire: Wire, payload: Payload) -> tuple[str, int, int, int | None]:
    return wire.index_encoding(payload.form), payload.form.k, payload.form.numel, payload.form.k_c


@settings(deadline=None, max_examples=600)
@given(mutated())
def test_whatever_the_bytes_are_indices_stay_in_range_or_the_message_is_refused(
    case: tuple[Wire, Payload, torch.Tensor],
) -> None:
    wire, payload, message = case
    try:
        (received,) = wire.decode([message], [payload.form], 7)
    except WireError:
        return
    indices = received.indices.tolist()
    assert received.values.numel() == len(indices) == payload.form.k and received.form == payload.form
    assert indices == sorted(set(indices))
    assert not indices or (indices[0] >= 0 and indices[-1] < payload.form.numel)
    assert torch.equal(message[:HEADER_BYTES], encoded(wire, payload, 7)[:HEADER_BYTES])


# ---- sizes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "encoding, k, n, index_bytes",
    [
        ("int32", 10, 1000, 40),
        ("bitmap", 10, 1000, 128),
        ("elias_fano", 10, 1000, 12),  # 6 low bits each are 8 bytes; 10 + 999 // 64 = 25 high bits are 4
        ("elias_fano", 1000, 1000, 252),  # no low bits; 1000 + 999 high bits
        ("elias_fano", 4, 40, 8),  # 3 low bits each are 12 bits; 4 + 39 // 8 = 8 high bits
        ("elias_fano", 0, 1000, 0),
        ("elias_fano", 1, 1, 4),
        ("chunk12", 10, 1000, 16),  # 120 bits
    ],
)
@pytest.mark.parametrize("dtype, bits_each, scale", [
    ("fp32", 32, 0), ("bf16", 16, 0), ("fp16", 16, 0), ("int8", 8, 4), ("int4", 4, 4), ("int2", 2, 4),
])  # fmt: skip
def test_sizes_by_hand(encoding: str, k: int, n: int, index_bytes: int, dtype: str, bits_each: int, scale: int) -> None:
    """Header, scales of blocks of 128, values and indices, each part in words of 4 bytes."""
    value_bytes = scale * -(-k // 128) + 4 * -(-bits_each * k // 32)
    form = Form(k, n, k_c=k if encoding == "chunk12" else None)
    assert Wire(dtype, encoding).message_bytes(form) == 24 + value_bytes + index_bytes


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 2**31 - 1), st.floats(0.0, 1.0))
@example(2**31 - 1, 1.0)
@example(8, 1.0)
def test_elias_fano_keeps_its_bound(n: int, density: float) -> None:
    """At most 2 + log2(n/k) bits an index (Elias 1974); its two parts end in a whole word of 32 bits each."""
    k = max(1, math.floor(density * n))
    size = Wire("fp32", "elias_fano").message_bytes(Form(k, n)) - HEADER_BYTES - 4 * k
    rounding = 1e-9 * k  # of log2 in double precision
    assert 8 * size <= k * (2 + math.log2(n / k)) + 2 * 31 + rounding


@pytest.mark.parametrize("density", [0.001, 0.01, 0.05])
def test_an_index_costs_little_more_than_its_entropy(density: float) -> None:
    """log2(1/density) + log2(e) bits are what k random of n entries take when k is much smaller than n."""
    n = 10**6
    payload = random_payload(round(density * n), n)
    values = HEADER_BYTES + 4 * payload.form.k
    spent = 8 * (encoded(Wire("fp32", "smallest"), payload).numel() - values) / payload.form.k
    entropy = math.log2(1 / density) + 1.44
    assert 0.95 * entropy < spent <= 1.1 * entropy
    assert 8 * (Wire("fp32", "int32").message_bytes(payload.form) - values) / payload.form.k > 2 * entropy  # control


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 10**6), st.floats(0.0, 1.0), st.booleans(), st.booleans())
def test_smallest_is_never_longer_than_any_encoding(n: int, density: float, shared: bool, in_chunks: bool) -> None:
    k_c = max(1, math.floor(density * ops.CHUNK)) if in_chunks else None
    k = math.floor(density * n) if k_c is None else ops.chunked_count(n, k_c)
    names = INDEX_ENCODINGS if in_chunks else ENCODINGS
    form = Form(k, n, shared, k_c)
    lengths = {name: Wire("fp32", name).message_bytes(form) for name in names}
    assert Wire("fp32", "smallest").message_bytes(form) == min(lengths.values())


@pytest.mark.parametrize(
    "form, chosen",
    [
        (Form(0, 8), "int32"),
        (Form(1, 2**20), "int32"),  # 4 bytes against 8
        (Form(8, 256), "elias_fano"),  # 5 bits and 1.9 against 32
        (Form(10**4, 10**6), "elias_fano"),
        (Form(6 * 10**5, 10**6), "bitmap"),
        (Form(2, 4000, k_c=2), "chunk12"),  # one word; no other does with that
        (Form(ops.chunked_count(10**6, 41), 10**6, k_c=41), "elias_fano"),
    ],
)
def test_smallest_chooses_by_density(form: Form, chosen: str) -> None:
    assert Wire("fp32", "smallest").index_encoding(form) == chosen


@pytest.mark.parametrize("encoding", INDEX_ENCODINGS)
def test_a_named_encoding_is_used_whatever_its_size(encoding: str) -> None:
    forms = [Form(min(k_c, 1000), 1000, k_c=k_c) for k_c in (1, 500, 1000)]
    assert {Wire("fp32", encoding).index_encoding(form) for form in forms} == {encoding}


def test_chunk12_is_no_choice_where_chunks_differ() -> None:
    assert Wire("fp32", "smallest").index_encoding(Form(2, 4000)) != "chunk12"  # the control stands above
