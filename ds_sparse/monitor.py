"""What is written to TensorBoard, CSV and W&B through DeepSpeed's monitors."""

from __future__ import annotations

from .accounting import CommStats

PARTS = ("select", "encode", "exchange", "decode", "rest")  # of the seconds of a boundary, in order


def events(stats: CommStats, residual_norm: float, grad_norm: float, samples: int) -> list[tuple[str, float, int]]:
    """(tag, value, x) of the latest accumulation boundary; x is samples, as in DeepSpeed's own scalars.

    Args:
        residual_norm, grad_norm: of this rank's shard.
    """
    last, total = stats.last, stats.total
    values = {
        "Comm/inter_node_bytes": last.inter_node_bytes,
        "Comm/intra_node_bytes": last.intra_node_bytes,
        "Comm/dense_bytes": last.dense_bytes,
        "Comm/dense_over_wire": last.dense_over_wire,
        "Comm/density": last.density,
        "Comm/density_asked": last.density_asked,
        "Comm/seconds": last.seconds,
        **{f"Comm/{part}_seconds": getattr(last, f"{part}_seconds") for part in PARTS},
        "Comm/residual_norm": residual_norm,
        "Comm/residual_over_gradient": residual_norm / grad_norm if grad_norm else 0.0,
        "Comm/exchanges": total.exchanges,
        "Comm/skipped": total.skipped,
        "Comm/gb_saved": total.saved_bytes / 1e9,
    }
    return [(tag, float(value), samples) for tag, value in values.items()]
