"""What is written to TensorBoard, CSV and W&B through DeepSpeed's monitors."""

from __future__ import annotations

from .accounting import StepStats


def events(last: StepStats, total: StepStats, residual_norm: float, samples: int) -> list[tuple[str, float, int]]:
    """(tag, value, x) of one accumulation boundary; x is samples, as in DeepSpeed's own scalars."""
    values = {
        "Comm/inter_node_bytes": last.inter_node_bytes,
        "Comm/dense_over_wire": last.dense_over_wire,
        "Comm/density": last.density,
        "Comm/seconds": last.seconds,
        "Comm/residual_norm": residual_norm,
        "Comm/exchanges": total.exchanges,
        "Comm/skipped": total.skipped,
        "Comm/fallback": last.fallback,
    }
    return [(tag, float(value), samples) for tag, value in values.items()]
