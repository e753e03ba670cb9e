"""One battery over every compressor: which entries it takes, and that nothing gets lost.

A new compressor is a row in `ds_sparse.compressors.COMPRESSORS` and is then tested here without further ado.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_st

from ds_sparse.compressors import (
    COMPRESSORS,
    Accumulation,
    ChunkedTopK,
    Compressor,
    Identity,
    MSTopK,
    Quota,
    RandomK,
    TopK,
)
from ds_sparse.compressors import build_compressor as build
from ds_sparse.config import CompressorSettings
from ds_sparse.ops import CHUNK
from ds_sparse.payload import Form, Payload

ROWS = {name: CompressorSettings(type=name) for name in COMPRESSORS} | {
    "mstopk, 30 samplings": CompressorSettings(type="mstopk", samplings=30),
    "mstopk, 1 sampling": CompressorSettings(type="mstopk", samplings=1),
}  # type: ignore[arg-type]

INPUTS: dict[str, Callable[[int], torch.Tensor]] = {
    "gaussian": torch.randn,
    "constant": lambda n: torch.full((n,), -0.75),
    "zeros of both signs": lambda n: torch.where(torch.arange(n) % 2 == 0, 0.0, -0.0),
    "ties": lambda n: torch.randint(-2, 3, (n,)).float(),
    "denormals": lambda n: torch.randint(-(2**22), 2**22, (n,)).float() * 2.0**-149,
    "infinities": lambda n: torch.where(torch.arange(n) % 3 == 0, torch.inf, -torch.inf),
    "one outlier": lambda n: torch.randn(n).index_fill_(0, torch.tensor([n // 2]), 1e30),
    "mostly zero": lambda n: torch.randn(n) * (torch.arange(n) % 17 == 0),
}
SIZES = [(1, 1), (5, 1), (5, 5), (100, 1), (100, 37), (100, 99), (100, 100), (5000, 50)]  # n, k


def form_of(compressor: Compressor, k: int, n: int) -> Form:
    """The form of this compressor that has k of n entries; `chunked_topk` spreads them over its chunks."""
    chunks = -(-n // CHUNK)
    return compressor.form(-(-k // chunks) / CHUNK if isinstance(compressor, ChunkedTopK) else k / n, n)


def take(compressor: Compressor, vector: torch.Tensor, k: int, step: int = 0) -> Payload:
    """k entries of a vector, with nothing kept from before."""
    form = form_of(compressor, k, vector.numel())
    return compressor.take_(torch.zeros_like(vector), Accumulation(vector), form, step)


@pytest.fixture(params=ROWS)
def compressor(request: pytest.FixtureRequest) -> Compressor:
    return build(ROWS[request.param])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32)


def accumulated(residual: torch.Tensor, added: Accumulation) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the residual and the velocity hold before anything is taken: one rounding for each operation."""
    new, velocity = added.grad, None
    if added.velocity is not None:
        new = velocity = added.velocity * added.momentum + added.grad
    return (residual * added.decay if added.decay != 1.0 else residual) + new, velocity


def assert_taken(payload: Payload, form: Form) -> None:
    """Exactly as announced: k distinct ascending indices below n."""
    k, n = form.k, form.numel
    indices = payload.indices.tolist()
    assert payload.indices.dtype == torch.int32 and payload.values.dtype == torch.float32
    assert len(indices) == payload.values.numel() == k and payload.form == form
    assert indices == sorted(set(indices)) and indices[0] >= 0 and indices[-1] < n


def assert_conserved(before: torch.Tensor, payload: Payload, residual: torch.Tensor) -> None:
    """Payload and residual together are what was accumulated, bit for bit, and share no entry."""
    taken = payload.indices.long()
    assert not bits(residual)[taken].any()  # +0 exactly
    again = residual.clone()
    again[taken] = payload.values
    assert torch.equal(bits(again), bits(before))


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("n, k", SIZES)
def test_exactly_k_entries_are_taken_and_nothing_is_lost(compressor: Compressor, kind: str, n: int, k: int) -> None:
    torch.manual_seed(n + k)
    residual, grad = torch.zeros(n), INPUTS[kind](n)
    before, _ = accumulated(residual, Accumulation(grad))
    form = form_of(compressor, k, n)
    payload = compressor.take_(residual, Accumulation(grad), form, step=3)
    assert (form.k, form.numel) == (n if isinstance(compressor, Identity) else k, n)
    assert_taken(payload, form)
    assert_conserved(before, payload, residual)


@pytest.mark.parametrize("decay", [1.0, 0.7])
@pytest.mark.parametrize("momentum", [None, 0.0, 0.9])
def test_what_is_kept_is_decayed_and_the_velocity_is_masked(
    compressor: Compressor, decay: float, momentum: float | None
) -> None:
    torch.manual_seed(1)
    residual, grad = torch.randn(300), torch.randn(300)
    added = Accumulation(grad, decay, momentum, None if momentum is None else torch.randn(300))
    before, velocity = accumulated(residual, added)
    given_grad = grad.clone()
    payload = compressor.take_(residual, added, form_of(compressor, 30, 300), step=0)
    assert_conserved(before, payload, residual)
    assert torch.equal(grad, given_grad)  # read only
    if velocity is not None and added.velocity is not None:
        velocity[payload.indices.long()] = 0.0
        assert torch.equal(bits(added.velocity), bits(velocity))


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from(sorted(ROWS)), st.sampled_from([1.0, 0.5]), st.sampled_from([None, 0.9]))
def test_conservation_for_any_finite_input(data: st.DataObject, row: str, decay: float, momentum: float | None) -> None:
    n = data.draw(st.integers(1, 40))
    # Up to 1e37, so that no sum overflows: inf - inf would compare as NaN.
    vectors = numpy_st.arrays("float32", n, elements=st.floats(-(2.0**122), 2.0**122, width=32))
    residual, grad, velocity = (torch.from_numpy(data.draw(vectors).copy()) for _ in range(3))
    added = Accumulation(grad, decay, momentum, None if momentum is None else velocity)
    before, _ = accumulated(residual, added)
    k = data.draw(st.integers(1, n))
    compressor = build(ROWS[row])
    form = form_of(compressor, k, n)
    payload = compressor.take_(residual, added, form, step=data.draw(st.integers(0, 10**6)))
    assert form.k == (n if row == "identity" else k)
    assert_taken(payload, form)
    assert_conserved(before, payload, residual)


def test_the_same_step_takes_the_same_entries_again(compressor: Compressor) -> None:
    x = torch.randn(200)
    first, second = (take(compressor, x, 20, step=5) for _ in range(2))
    assert torch.equal(first.indices, second.indices) and torch.equal(first.values, second.values)


def test_only_a_compressor_that_says_so_leaves_the_indices_out(compressor: Compressor) -> None:
    """`shared` indices are not sent, so they must not depend on what a node holds; others must."""
    one, other = torch.arange(1.0, 101.0), torch.arange(100.0, 0.0, -1.0)
    payloads = [take(compressor, x, 10, step=2) for x in (one, other)]
    assert {payload.form.shared for payload in payloads} == {compressor.shared_indices}
    assert torch.equal(payloads[0].indices, payloads[1].indices) is compressor.shared_indices


# ---- which entries ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ["topk", "mstopk", "mstopk, 31 samplings", "chunked_topk"])
@pytest.mark.parametrize("kind", INPUTS)
def test_exact_selections_take_the_largest_magnitudes(row: str, kind: str) -> None:
    samplings = 31 if "31" in row else None  # 31 halvings settle all 31 bits of a magnitude
    compressor = build(CompressorSettings(type=row.split(",")[0], samplings=samplings))  # type: ignore[arg-type]
    torch.manual_seed(4)
    residual = INPUTS[kind](1000)
    payload = compressor.take_(residual, Accumulation(torch.zeros(1000)), form_of(compressor, 70, 1000), step=0)
    assert payload.values.abs().min() >= residual.abs().max()


def test_topk_gives_ties_to_the_lowest_index() -> None:
    x = torch.tensor([1.0, -2.0, 2.0, 3.0, -2.0, 2.0])
    payload = take(TopK(), x, 3)
    assert payload.indices.tolist() == [1, 2, 3]
    assert payload.values.tolist() == [-2.0, 2.0, 3.0]


def test_few_samplings_make_mstopk_approximate() -> None:
    """The control of `samplings`: it must make a difference, and none to the entries above the upper threshold."""
    torch.manual_seed(0)
    x = torch.randn(10_000)
    exact, coarse = (set(take(MSTopK(samplings, 0), x, 100).indices.tolist()) for samplings in (31, 8))
    assert exact != coarse
    # After 8 halvings of 2^31 bit patterns the band is 2^23 patterns wide: a factor of 2 in magnitude.
    assert min(abs(x[i]) for i in coarse) >= min(abs(x[i]) for i in exact) / 2


def test_the_run_of_mstopk_starts_elsewhere_at_each_step_and_for_each_seed() -> None:
    def start(seed: int, step: int) -> int:
        indices = take(MSTopK(30, seed), torch.ones(10_000), 10, step).indices.tolist()
        assert indices == list(range(indices[0], indices[0] + 10))  # all entries tie: one contiguous run
        return indices[0]

    assert len({start(0, step) for step in range(8)}) == 8
    assert len({start(seed, 0) for seed in range(8)}) == 8


def test_randomk_draws_anew_at_each_step_and_reaches_every_entry() -> None:
    """Without either, error feedback would hold some entries back for good."""
    drawn = [take(RandomK(7), torch.ones(20), 5, step).indices for step in range(60)]
    assert len({tuple(indices.tolist()) for indices in drawn}) > 50
    assert torch.cat(drawn).unique().tolist() == list(range(20))


def randomk_draw(seed: int) -> list[int]:
    return take(RandomK(seed), torch.ones(50), 5).indices.tolist()


def test_randomk_depends_on_no_global_state_and_touches_none() -> None:
    torch.manual_seed(1)
    first, after = randomk_draw(0), torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(3))
    assert randomk_draw(0) == first


def test_randomk_depends_on_its_seed() -> None:
    assert len({tuple(randomk_draw(seed)) for seed in range(8)}) == 8


def test_randomk_does_not_rescale() -> None:
    payload = take(RandomK(0), torch.full((40,), 3.0), 4)
    assert payload.values.tolist() == [3.0] * 4


@pytest.mark.parametrize("tail", [0, 1, 6, 7, 100])
def test_chunked_topk_takes_the_largest_of_every_chunk(tail: int) -> None:
    """However small they are beside those of another chunk; of a last, short chunk all when it has no more."""
    torch.manual_seed(2)
    n = 2 * CHUNK + tail
    scales = torch.tensor([1e-6, 1.0, 1e3]).repeat_interleave(CHUNK)[:n]
    x = torch.randn(n) * scales
    form = ChunkedTopK().form(7 / CHUNK, n)
    payload = ChunkedTopK().take_(torch.zeros(n), Accumulation(x), form, step=0)
    expected = [start + part.abs().topk(min(7, part.numel())).indices for start, part in _chunks(x)]
    assert payload.indices.tolist() == torch.cat(expected).sort().values.tolist()
    assert payload.indices.numel() == form.k == 14 + min(7, tail)


def _chunks(x: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    return [(start, x[start : start + CHUNK]) for start in range(0, x.numel(), CHUNK)]


def test_topk_leaves_small_chunks_out() -> None:
    """The control of the test above."""
    x = torch.cat([torch.full((CHUNK,), 1e-6), torch.ones(CHUNK)])
    assert take(TopK(), x, 14).indices.min() >= CHUNK > take(ChunkedTopK(), x, 14).indices.min()


def test_identity_sends_everything_whatever_the_density_is() -> None:
    residual, form = torch.ones(6), Identity().form(1e-6, 6)
    payload = Identity().take_(residual, Accumulation(torch.arange(6.0)), form, step=0)
    assert payload.values.tolist() == [1, 2, 3, 4, 5, 6] and payload.form.density == 1.0
    assert residual.tolist() == [0.0] * 6


def test_every_type_of_the_configuration_has_a_compressor() -> None:
    built = {name: type(build(settings_)) for name, settings_ in ROWS.items()}
    assert built == {
        "mstopk": TopK, "topk": TopK, "chunked_topk": ChunkedTopK, "randomk": RandomK, "identity": Identity,
        "mstopk, 30 samplings": MSTopK, "mstopk, 1 sampling": MSTopK,
    }  # fmt: skip


# ---- how many ---------------------------------------------------------------------------------------------------

COUNTING = [TopK(), MSTopK(30, 0), RandomK(0)]
numels = st.integers(1, 2**31 - 1)
densities = st.floats(1e-12, 1.0)


@pytest.mark.parametrize(
    "density, numel, k",
    [
        (0.01, 100, 1),
        (0.01, 101, 2),  # rounded up: a density of at least 1 % was asked for
        (0.1, 30, 3),  # 0.1 * 30 is 3.0000000000000004 in binary: no fourth entry for that
        (0.07, 100, 7),  # 7.000000000000001 likewise
        (0.29, 100, 29),  # and 28.999999999999996 is no 28
        (1e-9, 10, 1),  # never none
        (0.5, 0, 0),  # but of nothing
        (1.0, 1, 1),
        (1.0, 2**31 - 1, 2**31 - 1),
        (0.01, 2**31 - 1, 21_474_837),
    ],
)
def test_entries_of_a_density(density: float, numel: int, k: int) -> None:
    for compressor in COUNTING:
        assert compressor.form(density, numel) == Form(k, numel, compressor.shared_indices)


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 9999), st.integers(1, 10**9), st.sampled_from(COUNTING))
def test_entries_are_the_exact_ceiling_for_densities_as_people_write_them(
    ten_thousandths: int, numel: int, compressor: Compressor
) -> None:
    exact = -(-Fraction(ten_thousandths, 10_000) * numel // 1)
    assert compressor.form(ten_thousandths / 10_000, numel).k == exact


@settings(deadline=None, max_examples=200)
@given(densities, densities, numels, st.sampled_from([*COUNTING, ChunkedTopK(), Identity()]))
def test_entries_stay_in_range_and_grow_with_the_density(
    one: float, other: float, numel: int, compressor: Compressor
) -> None:
    few, many = (compressor.form(density, numel).k for density in (min(one, other), max(one, other)))
    assert 1 <= few <= many <= numel
    assert compressor.form(1.0, numel).k == numel


@settings(deadline=None, max_examples=200)
@given(densities, numels)
def test_every_chunk_has_as_many_entries(density: float, numel: int) -> None:
    """The nearest whole number of a chunk's, and at least one; a last, short chunk has at most as many."""
    form = ChunkedTopK().form(density, numel)
    assert form.k_c is not None and 1 <= form.k_c <= CHUNK
    assert abs(form.k_c - density * CHUNK) <= (0.5 if density * CHUNK > 1 else 1.0)
    assert form.k == sum(min(form.k_c, part) for part in _chunk_lengths(numel % (4 * CHUNK))) + form.k_c * 4 * (
        numel // (4 * CHUNK)
    )


def _chunk_lengths(numel: int) -> list[int]:
    return [min(CHUNK, numel - start) for start in range(0, numel, CHUNK)]


@pytest.mark.parametrize("compressor", [TopK(), ChunkedTopK(), Identity()], ids=lambda c: type(c).__name__)
def test_a_quota_is_a_form_for_every_part(compressor: Compressor) -> None:
    quota = Quota(compressor, 0.01, 10_000)
    assert quota.whole == compressor.form(0.01, 10_000)
    assert quota.form(slice(4000, 9000)) == compressor.form(0.01, 5000)
    assert quota.form(slice(7, 7)).k == 0


def test_the_density_of_a_form() -> None:
    assert Form(2, 8).density == 0.25
    assert Form(0, 0).density == 1.0  # nothing was left out
