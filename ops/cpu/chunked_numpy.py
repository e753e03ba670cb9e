"""The CPU tier that needs no compiler: the same streaming pass in NumPy, chunk by chunk so that it stays in cache.

Exact, and equal to the reference bit for bit; some 2-5 passes' worth of time instead of 1-1.5.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .. import reference
from ..reference_codec import decode_indices, decode_values, encode_indices, encode_values_  # fast enough as they are
from ..types import MAGNITUDE_MASK, NAN_KEY, Accumulation, Selection, band_start

__all__ = [
    "chunked_topk_",
    "decode_indices",
    "decode_values",
    "encode_indices",
    "encode_values_",
    "mstopk_",
    "scatter_add_",
    "topk_",
]

BLOCK = 256 * 1024  # elements a step: 1 MiB of fp32, which the second-level cache holds
_LINES, _LINE = 1024, 16
_EXACT_BITS = 31

Keys = npt.NDArray[np.int32]
Positions = npt.NDArray[np.int64]


def topk_(residual: Tensor, accumulation: Accumulation | None, k: int, guess: int | None = None) -> Selection:
    """As :func:`ops.reference.topk_`; ``guess`` (a key) changes the time and never the result."""
    return _select_(residual, accumulation, k, _EXACT_BITS, None, guess)


def mstopk_(residual: Tensor, accumulation: Accumulation | None, k: int, samplings: int, seed: int) -> Selection:
    """As :func:`ops.reference.mstopk_`: the settled bits of the k-th key are the band, no counting needed."""
    return _select_(residual, accumulation, k, min(samplings, _EXACT_BITS), seed, None)


def scatter_add_(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """As :func:`ops.reference.scatter_add_`, with the indices checked."""
    at = indices.numpy()
    if at.size and (at[0] < 0 or at[-1] >= out.numel() or not (at[1:] > at[:-1]).all()):
        raise ValueError(f"indices must ascend strictly within 0..{out.numel() - 1}; nothing was added")
    out.numpy()[at] += values.numpy()


chunked_topk_ = reference.chunked_topk_  # rows sort well in torch as they are


@torch.no_grad()
def _select_(
    residual: Tensor, accumulation: Accumulation | None, k: int, bits: int, seed: int | None, guess: int | None
) -> Selection:
    """1. guess a threshold from a sample  2. per block: accumulate, find the candidates (key >= guess)
    3. too few: lower the guess and search the accumulated blocks again  4. k-th key of the candidates
    5. emit, zero. Only emitted places are written, so nothing has to be put back."""
    r = residual.detach().numpy()
    if k == 0:
        for block in _blocks(len(r)):
            _accumulate_(residual, accumulation, block)
        return reference.topk_(residual, None, 0)
    sample = _sample(residual, accumulation)
    guess = _guess(sample, k, len(r), 1) if guess is None else min(guess, NAN_KEY)
    found = _search(residual, accumulation, guess)
    widen = 4
    while len(found) < k:
        lower = _guess(sample, k, len(r), widen)
        guess, widen = (lower if lower < guess else 0), widen * 4
        found = _search(residual, None, guess)
    candidates = _keys(r[found])
    kth = int(np.partition(candidates, len(candidates) - k)[len(candidates) - k])
    lower_edge = kth >> (_EXACT_BITS - bits) << (_EXACT_BITS - bits)
    if lower_edge < guess:  # the band reaches below the candidates
        found = _search(residual, None, lower_edge)
        candidates = _keys(r[found])
    above = candidates > lower_edge + (1 << (_EXACT_BITS - bits)) - 1
    band = np.flatnonzero((candidates >= lower_edge) & ~above)
    wanted = k - int(np.count_nonzero(above))
    start = 0 if seed is None else band_start(seed, len(band) - wanted + 1)
    above[band[start : start + wanted]] = True
    return _emit_(residual, accumulation, found[above], lower_edge, len(found))


def _keys(values: npt.NDArray[np.float32]) -> Keys:
    return np.minimum(values.view(np.int32) & MAGNITUDE_MASK, NAN_KEY)


def _blocks(n: int) -> list[slice]:
    return [slice(i, min(n, i + BLOCK)) for i in range(0, n, BLOCK)]


def _accumulate_(residual: Tensor, accumulation: Accumulation | None, block: slice) -> None:
    """The specification's own accumulation on one block: the same roundings by construction."""
    if accumulation is not None:
        velocity = None if accumulation.velocity is None else accumulation.velocity[block]
        part = Accumulation(accumulation.grad[block], accumulation.decay, accumulation.momentum, velocity)
        reference.accumulate_(residual[block], part)


def _search(residual: Tensor, accumulation: Accumulation | None, guess: int) -> Positions:
    """Ascending positions of all keys >= guess, after accumulating (unless there is nothing to accumulate)."""
    keys = residual.numpy().view(np.int32)
    found = [np.empty(0, np.int64)]
    for block in _blocks(len(keys)):
        _accumulate_(residual, accumulation, block)
        # Raw bits will do here: no threshold lies between two NaN payloads.
        found.append(np.flatnonzero((keys[block] & MAGNITUDE_MASK) >= guess) + block.start)
    return np.concatenate(found)


def _sample(residual: Tensor, accumulation: Accumulation | None) -> Keys:
    """Keys of lines of neighbours at jittered places, as they will be after the accumulation; ascending."""
    n = residual.numel()
    if n <= _LINES * _LINE:
        at = torch.arange(n)
    else:
        stratum = n // _LINES
        jitter = np.random.default_rng(n).integers(0, stratum - _LINE + 1, _LINES)
        at = torch.from_numpy((np.arange(_LINES) * stratum + jitter)[:, None] + np.arange(_LINE)).flatten()
    values = residual[at]
    if accumulation is not None:
        velocity = None if accumulation.velocity is None else accumulation.velocity[at]
        reference.accumulate_(
            values, Accumulation(accumulation.grad[at], accumulation.decay, accumulation.momentum, velocity)
        )
    return np.sort(_keys(values.numpy()))


def _guess(sample: Keys, k: int, n: int, widen: int) -> int:
    """The key whose rank in the sample is k's share, plus four standard deviations; 0 when the sample ends there."""
    share = len(sample) * k / n
    rank = int(widen * (share if len(sample) == n else share + 4 * share**0.5 + 1))
    return int(sample[-rank]) if 0 < rank <= len(sample) else 0


def _emit_(
    residual: Tensor, accumulation: Accumulation | None, found: Positions, threshold: int, candidates: int
) -> Selection:
    r = residual.numpy()
    values = torch.from_numpy(r[found])
    r[found] = 0.0
    if accumulation is not None and accumulation.velocity is not None:
        accumulation.velocity.numpy()[found] = 0.0
    indices = torch.from_numpy(found.astype(np.int32))
    return Selection(
        values, indices, torch.tensor(threshold, dtype=torch.int32).view(torch.float32), torch.tensor(candidates)
    )
