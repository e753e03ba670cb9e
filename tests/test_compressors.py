"""One battery over every compressor: which entries it takes, and that nothing gets lost.

A new compressor is a row in `ds_sparse.compressors.COMPRESSORS` and is then tested here without further ado.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_st

from ds_sparse.compressors import COMPRESSORS, Accumulation, Compressor, Identity, MSTopK, RandomK, TopK
from ds_sparse.compressors import build_compressor as build
from ds_sparse.config import CompressorSettings
from ds_sparse.payload import Payload

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


def assert_taken(payload: Payload, k: int, n: int) -> None:
    """Exactly k distinct ascending indices below n."""
    indices = payload.indices.tolist()
    assert payload.indices.dtype == torch.int32 and payload.values.dtype == torch.float32
    assert len(indices) == payload.values.numel() == k and payload.numel == n
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
    payload = compressor.take_(residual, Accumulation(grad), k, step=3)
    assert_taken(payload, n if isinstance(compressor, Identity) else k, n)
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
    payload = compressor.take_(residual, added, 30, step=0)
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
    payload = build(ROWS[row]).take_(residual, added, k, step=data.draw(st.integers(0, 10**6)))
    assert_taken(payload, n if row == "identity" else k, n)
    assert_conserved(before, payload, residual)


def test_the_same_step_takes_the_same_entries_again(compressor: Compressor) -> None:
    x = torch.randn(200)
    first, second = (compressor.take_(torch.zeros(200), Accumulation(x), 20, step=5) for _ in range(2))
    assert torch.equal(first.indices, second.indices) and torch.equal(first.values, second.values)


def test_only_a_compressor_that_says_so_leaves_the_indices_out(compressor: Compressor) -> None:
    """`shared` indices are not sent, so they must not depend on what a node holds; others must."""
    one, other = torch.arange(1.0, 101.0), torch.arange(100.0, 0.0, -1.0)
    payloads = [compressor.take_(torch.zeros(100), Accumulation(x), 10, step=2) for x in (one, other)]
    assert {payload.shared for payload in payloads} == {compressor.shared_indices}
    assert torch.equal(payloads[0].indices, payloads[1].indices) is compressor.shared_indices


# ---- which entries ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ["topk", "mstopk", "mstopk, 31 samplings"])
@pytest.mark.parametrize("kind", INPUTS)
def test_exact_selections_take_the_largest_magnitudes(row: str, kind: str) -> None:
    samplings = 31 if "31" in row else None  # 31 halvings settle all 31 bits of a magnitude
    compressor = build(CompressorSettings(type=row.split(",")[0], samplings=samplings))  # type: ignore[arg-type]
    torch.manual_seed(4)
    residual = INPUTS[kind](1000)
    payload = compressor.take_(residual, Accumulation(torch.zeros(1000)), 70, step=0)
    assert payload.values.abs().min() >= residual.abs().max()


def test_topk_gives_ties_to_the_lowest_index() -> None:
    x = torch.tensor([1.0, -2.0, 2.0, 3.0, -2.0, 2.0])
    payload = TopK().take_(torch.zeros(6), Accumulation(x), 3, step=0)
    assert payload.indices.tolist() == [1, 2, 3]
    assert payload.values.tolist() == [-2.0, 2.0, 3.0]


def test_few_samplings_make_mstopk_approximate() -> None:
    """The control of `samplings`: it must make a difference, and none to the entries above the upper threshold."""
    torch.manual_seed(0)
    x = torch.randn(10_000)
    exact, coarse = (
        set(MSTopK(samplings, 0).take_(x.clone(), Accumulation(torch.zeros_like(x)), 100, step=0).indices.tolist())
        for samplings in (31, 8)
    )
    assert exact != coarse
    # After 8 halvings of 2^31 bit patterns the band is 2^23 patterns wide: a factor of 2 in magnitude.
    assert min(abs(x[i]) for i in coarse) >= min(abs(x[i]) for i in exact) / 2


def test_the_run_of_mstopk_starts_elsewhere_at_each_step_and_for_each_seed() -> None:
    def start(seed: int, step: int) -> int:
        payload = MSTopK(30, seed).take_(torch.ones(10_000), Accumulation(torch.zeros(10_000)), 10, step)
        indices = payload.indices.tolist()
        assert indices == list(range(indices[0], indices[0] + 10))  # all entries tie: one contiguous run
        return indices[0]

    assert len({start(0, step) for step in range(8)}) == 8
    assert len({start(seed, 0) for seed in range(8)}) == 8


def test_randomk_draws_anew_at_each_step_and_reaches_every_entry() -> None:
    """Without either, error feedback would hold some entries back for good."""
    drawn = [RandomK(7).take_(torch.ones(20), Accumulation(torch.zeros(20)), 5, step).indices for step in range(60)]
    assert len({tuple(indices.tolist()) for indices in drawn}) > 50
    assert torch.cat(drawn).unique().tolist() == list(range(20))


def randomk_draw(seed: int) -> list[int]:
    return RandomK(seed).take_(torch.ones(50), Accumulation(torch.zeros(50)), 5, step=0).indices.tolist()


def test_randomk_depends_on_no_global_state_and_touches_none() -> None:
    torch.manual_seed(1)
    first, after = randomk_draw(0), torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(3))
    assert randomk_draw(0) == first


def test_randomk_depends_on_its_seed() -> None:
    assert len({tuple(randomk_draw(seed)) for seed in range(8)}) == 8


def test_randomk_does_not_rescale() -> None:
    payload = RandomK(0).take_(torch.full((40,), 3.0), Accumulation(torch.zeros(40)), 4, step=0)
    assert payload.values.tolist() == [3.0] * 4


def test_identity_sends_everything_whatever_k_is() -> None:
    residual = torch.ones(6)
    payload = Identity().take_(residual, Accumulation(torch.arange(6.0)), 1, step=0)
    assert payload.values.tolist() == [1, 2, 3, 4, 5, 6] and payload.density == 1.0
    assert residual.tolist() == [0.0] * 6


def test_every_type_of_the_configuration_has_a_compressor() -> None:
    built = {name: type(build(settings_)) for name, settings_ in ROWS.items()}
    assert built == {
        "mstopk": TopK, "topk": TopK, "randomk": RandomK, "identity": Identity,
        "mstopk, 30 samplings": MSTopK, "mstopk, 1 sampling": MSTopK,
    }  # fmt: skip
