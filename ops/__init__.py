"""Selection kernels: error-feedback top-k, MSTopK, chunked top-k and the ordered sum of sparse payloads.

One contract, several tiers, chosen by ``tensor.device``; :mod:`.reference` is the specification.
"""

from __future__ import annotations

from .api import backend_info, chunked_topk_, ef_topk_, mstopk_, scatter_add_, sum_payloads_
from .types import CHUNK, Selection, chunked_count

__all__ = [
    "CHUNK",
    "Selection",
    "backend_info",
    "chunked_count",
    "chunked_topk_",
    "ef_topk_",
    "mstopk_",
    "scatter_add_",
    "sum_payloads_",
]
