"""What is written to TensorBoard, CSV and W&B through DeepSpeed's monitors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .accounting import PARTS, CommStats
from .feedback import Selection
from .shard import ShardLayout


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
        "Comm/fallback": last.fallback,
        "Comm/gb_saved": total.saved_bytes / 1e9,
    }
    return [(tag, float(value), samples) for tag, value in values.items()]


def _chart(*tags: str) -> list[Any]:
    """Lines of one chart; TensorBoard takes a tag for the start of a regular expression."""
    return ["Multiline", [f"^{re.escape(tag)}$" for tag in tags]]


DENSITIES = "CommDensity/"  # a tag for each parameter
THRESHOLDS = "CommThreshold/smallest_sent"
PAGE = "Communication"
LAYOUT = {  # as SummaryWriter.add_custom_scalars takes it
    PAGE: {
        "bytes of a step": _chart("Comm/inter_node_bytes", "Comm/intra_node_bytes", "Comm/dense_bytes"),
        "dense/wire": _chart("Comm/dense_over_wire"),
        "seconds of a step": _chart("Comm/seconds", *(f"Comm/{part}_seconds" for part in PARTS)),
        "density, asked and sent": _chart("Comm/density_asked", "Comm/density"),
        "residual over gradient": _chart("Comm/residual_over_gradient"),
        "steps skipped": _chart("Comm/skipped"),
        "dense because it is faster": _chart("Comm/fallback"),
        "GB saved": _chart("Comm/gb_saved"),
        "density by parameter": ["Multiline", [f"^{DENSITIES}"]],
    }
}


class Selected(NamedTuple):
    """What one step sent of each compressed parameter on a shard.

    Attributes:
        names: of the parameters.
        density: fp32 [len(names)], the share of a parameter's entries that was sent.
        smallest: fp32 [len(names)], the smallest magnitude among them; infinite where nothing was sent.
    """

    names: list[str]
    density: torch.Tensor
    smallest: torch.Tensor

    def thresholds(self) -> torch.Tensor:
        """`smallest` of the parameters of which anything was sent."""
        return self.smallest[self.smallest.isfinite()]


def selected(layout: ShardLayout, selections: Sequence[Selection]) -> Selected:
    """Sorts what was selected by parameter; on the CPU."""
    segments = [segment for segment in layout.segments if not segment.dense]
    indices = torch.cat([selection.indices.cpu() + selection.region.start for selection in selections])
    magnitudes = torch.cat([selection.magnitudes.cpu() for selection in selections])
    ends = torch.tensor([segment.start + segment.numel for segment in segments], dtype=indices.dtype)
    owner = torch.searchsorted(ends, indices, right=True)
    counts = torch.bincount(owner, minlength=len(segments))
    smallest = torch.full((len(segments),), torch.inf).scatter_reduce_(0, owner, magnitudes, "amin")
    sizes = torch.tensor([segment.numel for segment in segments])
    return Selected([segment.name for segment in segments], counts / sizes, smallest)


def density_events(found: Selected, samples: int) -> list[tuple[str, float, int]]:
    """One scalar a parameter."""
    return [(DENSITIES + name, float(density), samples) for name, density in zip(*found[:2], strict=True)]
