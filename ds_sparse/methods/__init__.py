"""Methods of level 2, one file each. A new one joins by a file and a row here."""

from __future__ import annotations

from .base import AdamState, Context, Method
from .dense import Dense
from .sparse_gradient import SparseGradient
from .sparse_momentum import SparseMomentum

METHODS: dict[str, type[Method]] = {
    "dense": Dense,
    "sparse_gradient": SparseGradient,
    "sparse_momentum": SparseMomentum,
}

__all__ = ["METHODS", "AdamState", "Context", "Dense", "Method", "SparseGradient", "SparseMomentum"]
