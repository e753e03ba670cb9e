"""Every peer gets every payload (HiTopKComm, Shi et al. 2021, Algorithm 2, step 3)."""

from __future__ import annotations

from collections import deque

import torch

from ..compressors import Quota
from ..costs import Cost, dense_bytes
from ..feedback import Offer
from ..links import Flight, Link
from ..payload import Form
from ..wire import Wire
from .base import SparseExchange


class AllGatherExchange(SparseExchange):
    """Each rank sends (m - 1) messages, so that the cost grows with the number of nodes m.

    In `chunks` regions, which go through three stages in turn: while one is selected and encoded, the one before is on
    the wire, and the one before that is decoded and summed. Each region has its own share of the entries.

    Args:
        chunks: regions; 1 selects over the whole shard and overlaps nothing.
    """

    def __init__(self, peers: Link, wire: Wire, chunks: int = 1) -> None:
        super().__init__(peers, wire)
        self._chunks = chunks

    def _mean_payloads_(self, offer: Offer, out: torch.Tensor) -> None:
        flights: deque[tuple[slice, Form, torch.Tensor | None, Flight]] = deque()
        for region in self._regions(offer.quota.numel):
            # 1. Select and encode; keep what rounding loses.
            with self._time("select"):
                payload = offer.take_(region)
            with self._time("encode"):
                message = self._wire.encode_(payload, offer.step)
                if not self._wire.exact:
                    offer.feedback.give_back_(payload.indices, payload.values, region)
            # 2. Send it off.
            shared = payload.indices if payload.form.shared else None
            flights.append((region, payload.form, shared, self._peers.start_gather(message)))
            # 3. Meanwhile sum up the one before.
            if len(flights) > 1:
                self._land(out, offer.step, *flights.popleft())
        while flights:
            self._land(out, offer.step, *flights.popleft())

    def _land(
        self, out: torch.Tensor, step: int, region: slice, form: Form, shared: torch.Tensor | None, flight: Flight
    ) -> None:
        """Sums a region in peer order, so that float rounding is the same on every peer."""
        with self._time("exchange"):
            messages = list(flight.wait())
        with self._time("decode"):
            part = out[region].zero_()
            for payload in self._wire.decode(messages, [form] * len(messages), step, shared):
                self._add_mean_(part, payload)

    def _regions(self, numel: int) -> list[slice]:
        chunks = max(1, min(self._chunks, numel))
        edges = [numel * chunk // chunks for chunk in range(chunks + 1)]
        return [slice(start, stop) for start, stop in zip(edges, edges[1:], strict=False)]

    def cost(self, quota: Quota, excluded: int) -> Cost:
        others = self._peers.size - 1
        forms = [quota.form(region) for region in self._regions(quota.numel)]
        gathered = others * sum(map(self._wire.message_bytes, forms))
        sent, k = gathered + dense_bytes(excluded, self._peers.size), sum(form.k for form in forms)
        return Cost(sent, others, quota.numel, self._peers.size * k, k, gathered)
