"""The kernels' specification, in torch: short enough to be checked by eye; every other tier must equal it bit for bit.

Order of magnitudes: ``bits & 0x7fffffff`` compared as integers, so -0 equals 0 and NaN > Inf > every finite value.
A NaN is thus emitted first and cannot hide in a residual. Which payload a NaN carries after an addition is the
processor's affair, so all NaNs rank equal and their payload is no part of the contract.
Ties: lowest index first. Output order: ascending index. Deterministic; any device; may wait for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .reference_codec import decode_indices, decode_values, encode_indices, encode_values_
from .types import MAGNITUDE_MASK, NAN_KEY, Accumulation, Selection, band_start

__all__ = [
    "accumulate_",
    "chunked_topk_",
    "decode_indices",
    "decode_values",
    "encode_indices",
    "encode_values_",
    "magnitude_keys",
    "mstopk_",
    "scatter_add_",
    "topk_",
]

_KEY_BITS = 31


def magnitude_keys(x: Tensor) -> Tensor:
    """fp32 [n] -> int32 [n] that orders like the magnitudes."""
    return (x.view(torch.int32) & MAGNITUDE_MASK).clamp_max_(NAN_KEY)


def accumulate_(residual: Tensor, accumulation: Accumulation) -> None:
    """Add this step's gradient to the residual, in place, one fp32 rounding per operation and none fused.

    1. velocity = momentum * velocity + grad   (DGC's momentum correction, Lin et al. 2018, eq. 4; else velocity = grad)
    2. residual = decay * residual + velocity
    """
    added = accumulation.grad.to(torch.float32)
    if accumulation.velocity is not None:
        assert accumulation.momentum is not None
        added = accumulation.velocity.mul_(accumulation.momentum).add_(added)
    if accumulation.decay != 1.0:
        residual.mul_(accumulation.decay)
    residual.add_(added)


@torch.no_grad()
def topk_(residual: Tensor, accumulation: Accumulation | None, k: int) -> Selection:
    """Exactly the k largest magnitudes. ``threshold`` is the smallest of them (inf when k = 0).

    1. accumulate  2. T = k-th largest key  3. all keys > T, then keys == T by index  4. zero the emitted places
    (and the velocity there: DGC's factor masking).
    """
    if accumulation is not None:
        accumulate_(residual, accumulation)
    if k == 0:
        return _emit_(residual, accumulation, torch.empty(0, dtype=torch.int64, device=residual.device), None)
    keys = magnitude_keys(residual)
    threshold = torch.topk(keys, k, sorted=False).values.min()
    above = torch.nonzero(keys > threshold).flatten()
    ties = torch.nonzero(keys == threshold).flatten()[: k - above.numel()]
    indices = torch.cat([above, ties]).sort().values
    return _emit_(residual, accumulation, indices, threshold)


@torch.no_grad()
def mstopk_(residual: Tensor, accumulation: Accumulation | None, k: int, samplings: int, seed: int) -> Selection:
    """MSTopK (Shi et al., MLSys 2021, algorithm 1): a threshold search by counting, then a random run of the rest.

    The bisection runs over the keys 0 .. 2^31 instead of mean .. max: it cannot be thrown off by one outlier, it
    finds thresholds below the mean, and each sampling settles one bit, so 31 make it exact. A threshold that hits
    exactly k entries counts as the lower one; the emitted set is then the same whichever side it is put on.

    1. accumulate  2. bisect: {key >= upper} has fewer than k entries, {key >= lower} at least k
    3. emit {key >= upper} and a run of the band [lower, upper), contiguous in the band's index order, from a start
       drawn uniformly from all that leave room for the run  4. zero the emitted places.
    ``threshold`` is the band's lower edge.
    """
    if accumulation is not None:
        accumulate_(residual, accumulation)
    if k == 0:
        return _emit_(residual, accumulation, torch.empty(0, dtype=torch.int64, device=residual.device), None)
    keys = magnitude_keys(residual)
    lower, upper = 0, 1 << _KEY_BITS  # the upper edge stands above NaN: a search that finds nothing selects nothing
    for _ in range(min(samplings, _KEY_BITS)):
        sample = (lower + upper) // 2
        if int(torch.count_nonzero(keys >= sample)) < k:
            upper = sample
        else:
            lower = sample
    above = torch.nonzero(keys > upper - 1).flatten()  # upper itself does not fit int32
    band = torch.nonzero((keys >= lower) & (keys <= upper - 1)).flatten()
    wanted = k - above.numel()
    start = band_start(seed, band.numel() - wanted + 1)
    indices = torch.cat([above, band[start : start + wanted]]).sort().values
    return _emit_(residual, accumulation, indices, torch.tensor(lower, dtype=torch.int32, device=residual.device))


@torch.no_grad()
def chunked_topk_(residual: Tensor, accumulation: Accumulation | None, k_c: int, chunk: int) -> Selection:
    """The k_c largest of every ``chunk`` consecutive elements; of a last, shorter chunk all when it has fewer.

    ``threshold`` is the smallest emitted magnitude (inf when nothing is emitted).
    """
    if accumulation is not None:
        accumulate_(residual, accumulation)
    keys = magnitude_keys(residual)
    whole = keys.numel() // chunk * chunk
    kept = [torch.empty(0, dtype=torch.int64, device=keys.device)]
    for first, rows in ((0, keys[:whole].view(-1, chunk)), (whole, keys[whole:].view(1, -1))):
        best = torch.sort(rows, dim=1, descending=True, stable=True).indices[:, :k_c]
        row_starts = first + torch.arange(len(rows), device=keys.device)[:, None] * chunk
        kept.append((row_starts + best).flatten())
    indices = torch.cat(kept).sort().values
    return _emit_(residual, accumulation, indices, keys[indices].min() if indices.numel() else None)


@torch.no_grad()
def scatter_add_(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """out[indices] += values; the indices of one call are distinct, so no two additions meet."""
    out[indices.long()] += values


def _emit_(
    residual: Tensor, accumulation: Accumulation | None, indices: Tensor, threshold_key: Tensor | None
) -> Selection:
    """Copy the entries out and leave +0 behind, in the velocity too: no arithmetic, so nothing is lost to rounding."""
    values = residual[indices]
    residual[indices] = 0.0
    if accumulation is not None and accumulation.velocity is not None:
        accumulation.velocity[indices] = 0.0
    if threshold_key is None:
        threshold = torch.tensor(float("inf"), device=residual.device)
    else:
        threshold = threshold_key.to(torch.int32).view(torch.float32)
    looked_at = torch.tensor(residual.numel(), device=residual.device)
    return Selection(values, indices.to(torch.int32), threshold, looked_at)
