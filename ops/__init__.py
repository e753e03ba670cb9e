"""Kernels: error-feedback top-k, MSTopK, chunked top-k, the ordered sum of sparse payloads, and their wire codecs.

One contract, several tiers, chosen by ``tensor.device``; :mod:`.reference` is the specification.
"""

from __future__ import annotations

from .api import backend_info, chunked_topk_, ef_topk_, mstopk_, scatter_add_, sum_payloads_
from .codec import decode_indices, decode_values, encode_indices, encode_values_, index_bytes, value_bytes
from .types import CHUNK, Decoded, Selection, chunked_count

__all__ = [
    "CHUNK",
    "Decoded",
    "Selection",
    "backend_info",
    "chunked_count",
    "chunked_topk_",
    "decode_indices",
    "decode_values",
    "ef_topk_",
    "encode_indices",
    "encode_values_",
    "index_bytes",
    "mstopk_",
    "scatter_add_",
    "sum_payloads_",
    "value_bytes",
]
