"""The public calls: check the arguments, then hand them to the tier of the tensor's device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, float32, int32

from .checks import check_accumulation, check_device, check_int, check_residual, check_vector
from .tiers import backend_info, tier_of
from .types import CHUNK, Selection

__all__ = ["backend_info", "chunked_topk_", "ef_topk_", "mstopk_", "scatter_add_", "sum_payloads_"]


def ef_topk_(
    residual: Tensor,
    grad: Tensor,
    k: int,
    *,
    momentum: float | None = None,
    velocity: Tensor | None = None,
    decay: float = 1.0,
) -> Selection:
    """Add ``grad`` into ``residual``, emit exactly its k largest magnitudes and leave zeros in their places.

    Args:
        residual: fp32 [n], contiguous; changed in place to what was not emitted. n < 2^31.
        grad: fp32, bf16 or fp16 [n], contiguous, same device; read only.
        k: how many entries to emit, 0..n.
        momentum: with ``velocity``, DGC's momentum correction (Lin et al., ICLR 2018): velocity = momentum * velocity
            + grad, and the velocity is what is added. In [0, 1].
        velocity: fp32 [n]; changed in place, and zeroed where an entry is emitted (factor masking).
        decay: the residual is multiplied by it before the addition. In [0, 1].

    Returns:
        Selection: ties go to the lowest index; NaN ranks above Inf above every finite value (magnitudes compare as
        ``bits & 0x7fffffff``); indices ascend; ``threshold`` is the smallest emitted magnitude.
        Conservation is bitwise: scattering the values into the new residual gives the accumulated vector back.

    Determinism: the same bits on every tier, for any number of threads and any internal guess; ``candidates`` alone
    may differ. On CUDA the call does not wait for the device.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what is allowed; nothing was changed.
    """
    check_residual(residual)
    accumulation = check_accumulation(residual, grad, momentum, velocity, decay)
    check_int("k", k, 0, residual.numel(), "residual.numel()")
    return tier_of(residual).topk_(residual.detach(), accumulation, k)


def mstopk_(
    residual: Tensor,
    k: int,
    *,
    samplings: int = 30,
    seed: int = 0,
    grad: Tensor | None = None,
    momentum: float | None = None,
    velocity: Tensor | None = None,
    decay: float = 1.0,
) -> Selection:
    """MSTopK (Shi et al., MLSys 2021, algorithm 1): emit k entries found by ``samplings`` threshold counts.

    Everything above an upper threshold is emitted; the rest of the k is a run, contiguous in index order, of the
    entries between the two thresholds, from a random start. The search halves the range of fp32 bit patterns, so
    that each sampling settles one bit and 31 give the exact top-k.

    Args:
        residual: fp32 [n], contiguous; emitted places are zeroed in place.
        k: how many entries to emit, 0..n.
        samplings: thresholds tried, at least 1.
        seed: draws the run's start; the same seed gives the same selection. 0..2^64-1.
        grad, momentum, velocity, decay: as in :func:`ef_topk_`; without ``grad`` nothing is accumulated.

    Returns:
        Selection: exactly k distinct ascending indices for every input; ``threshold`` is the lower edge of the band:
        no emitted magnitude is below it. Bitwise equal on every tier.

    Raises:
        TypeError, ValueError: as :func:`ef_topk_`.
    """
    check_residual(residual)
    accumulation = None
    if grad is not None:
        accumulation = check_accumulation(residual, grad, momentum, velocity, decay)
    elif momentum is not None or velocity is not None or decay != 1.0:
        raise ValueError("momentum, velocity and decay act on an accumulation: pass grad as well")
    check_int("k", k, 0, residual.numel(), "residual.numel()")
    check_int("samplings", samplings, 1, 1 << 31)
    check_int("seed", seed, 0, (1 << 64) - 1)
    return tier_of(residual).mstopk_(residual.detach(), accumulation, k, samplings, seed)


def chunked_topk_(
    residual: Tensor,
    grad: Tensor,
    k_c: int,
    chunk: int = CHUNK,
    *,
    momentum: float | None = None,
    velocity: Tensor | None = None,
    decay: float = 1.0,
) -> Selection:
    """Add ``grad`` into ``residual`` and emit the k_c largest magnitudes of every ``chunk`` consecutive elements.

    A last, shorter chunk emits k_c too, or all it has: ``chunked_count(n, k_c, chunk)`` entries in all.

    Args:
        residual, grad, momentum, velocity, decay: as in :func:`ef_topk_`.
        k_c: entries a chunk, 0..chunk.
        chunk: elements a chunk, 1..4096.

    Returns:
        Selection: indices into the whole vector, ascending; ties by lowest index; ``threshold`` is the smallest
        emitted magnitude. Bitwise equal on every tier.

    Raises:
        TypeError, ValueError: as :func:`ef_topk_`.
    """
    check_residual(residual)
    accumulation = check_accumulation(residual, grad, momentum, velocity, decay)
    check_int("chunk", chunk, 1, CHUNK)
    check_int("k_c", k_c, 0, chunk, "chunk")
    return tier_of(residual).chunked_topk_(residual.detach(), accumulation, k_c, chunk)


def scatter_add_(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """out[indices] += values, one fp32 addition for each index.

    Args:
        out: fp32 [n], contiguous; changed in place.
        indices: int32 [k], strictly ascending, each in 0..n-1.
        values: fp32 [k].

    Deterministic: no two additions of one call meet. Peers are summed by one call each, in the peers' order.

    Raises:
        ValueError: as :func:`ef_topk_`; also, on the CPU, for indices that do not ascend or lie outside (nothing was
        added then). On CUDA an index outside ends in a device-side trap, which the next synchronisation reports.
    """
    check_vector("out", out)
    check_vector("indices", indices, (int32,))
    check_vector("values", values, (float32,))
    if indices.numel() != values.numel():
        raise ValueError(f"values must have as many elements as indices ({indices.numel()}), got {values.numel()}")
    check_device("indices", indices, "out", out)
    check_device("values", values, "out", out)
    tier_of(out).scatter_add_(out.detach(), indices, values.detach())


def sum_payloads_(out: Tensor, indices: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Add one sparse payload per peer into ``out``, in the order of the sequences, whatever the tier.

    fp32 addition is not associative: replicas stay bitwise equal because every rank adds the same payloads in the
    same (peer) order. Arguments of each payload as in :func:`scatter_add_`.
    """
    if len(indices) != len(values):
        raise ValueError(f"values must have one entry per peer like indices ({len(indices)}), got {len(values)}")
    for peer_indices, peer_values in zip(indices, values, strict=True):
        scatter_add_(out, peer_indices, peer_values)
