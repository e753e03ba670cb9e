"""Each peer sums a range of the indices and passes on the largest sums: a cost that does not grow with the nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .. import ops
from ..compressors import Quota
from ..costs import Cost, dense_bytes
from ..feedback import Offer
from ..payload import Form, Payload
from .base import SparseExchange

BUCKETS = 1024
SENT_ENTRIES = 1.6  # of k: what each rank sends in both halves together


class ReduceScatterExchange(SparseExchange):
    """A sparse all-reduce in two halves (Ok-Topk, Li and Hoefler 2022, section 3.1), with a second error feedback.

     1. count where this rank's entries fall; gather the counts of all peers
     2. give each peer a range of the indices with as many of all entries as any other
     3. send the entries to the owners of their ranges
     4. owners sum in peer order, add what they kept of earlier sums, and take the largest out of it
     5. gather what all owners took

    A rank sends (m - 1)/m k entries in the first half. The second gets what is left of 1.6 k, so that a rank sends the
    same at any number of nodes m; at m = 2 that is all there is.
    """

    owns = True

    def _mean_payloads_(self, offer: Offer, out: torch.Tensor) -> None:
        with self._time("select"):
            payload = offer.take_(offer.whole)
        # 1. and 2. Ranges, and how many entries each peer has in each of them.
        ranges, counts = self._ranges(payload)
        # 3. Entries to their owners.
        own = ranges[self._peers.rank]
        received = self._send_to_owners(offer, payload, ranges, counts)
        # 4. Sum and select again.
        with self._time("decode"):
            out.zero_()
            for part in received:
                ops.scatter_add_(out[own], part.indices, part.values)
        forms = [Form(min(_length(r), self._passed_on(payload.form)), _length(r)) for r in ranges]
        with self._time("select"):
            taken = offer.feedback.take_owned_(out[own], forms[self._peers.rank].k, own)
        # 5. To everybody.
        gathered = self._gather(offer, taken, forms)
        with self._time("decode"):
            out[own] = 0.0
            for region, part in zip(ranges, gathered, strict=True):
                self._add_mean_(out[region], part)

    def _ranges(self, payload: Payload) -> tuple[list[slice], list[list[int]]]:
        """A range for each peer, equal in entries to a bucket, and the entries of peer i in range j."""
        m, edges = self._peers.size, torch.tensor(_edges(payload.form.numel), dtype=torch.int32)
        below = torch.searchsorted(payload.indices, edges.to(payload.indices.device)).to(torch.int32)
        with self._time("exchange"):
            positions = self._peers.gather(below).cpu().long()  # [m, edges]: entries of a peer below an edge
        total = positions.sum(0)
        wanted = torch.arange(1, m) * int(total[-1]) // m
        bounds = [0, *torch.searchsorted(total, wanted).tolist(), len(edges) - 1]
        places = edges[bounds].tolist()
        counts = positions[:, bounds].diff(dim=1).tolist()
        return [slice(start, stop) for start, stop in zip(places, places[1:], strict=False)], counts

    def _send_to_owners(
        self, offer: Offer, payload: Payload, ranges: Sequence[slice], counts: Sequence[Sequence[int]]
    ) -> list[Payload]:
        """What all peers have in this rank's range."""
        rank, parts, first = self._peers.rank, [], 0
        with self._time("encode"):
            for region, k in zip(ranges, counts[rank], strict=True):
                last = first + k
                indices = payload.indices[first:last] - region.start
                part = Payload(payload.values[first:last], indices, Form(k, _length(region)))
                parts.append(self._wire.encode_(part, offer.step))
                first = last
            if not self._wire.exact:  # the parts' values are views: what they lost stands in the payload
                offer.feedback.give_back_(payload.indices, payload.values, offer.whole)
        forms = [Form(row[rank], _length(ranges[rank])) for row in counts]
        with self._time("exchange"):
            messages = self._peers.deal(parts, [self._wire.message_bytes(form) for form in forms])
        with self._time("decode"):
            return self._wire.decode(messages, forms, offer.step)

    def _gather(self, offer: Offer, taken: Payload, forms: Sequence[Form]) -> list[Payload]:
        """What all owners took. Messages of different ranges differ by some bytes; all are sent as the longest."""
        lengths = [self._wire.message_bytes(form) for form in forms]
        with self._time("encode"):
            message = self._wire.encode_(taken, offer.step)
            if not self._wire.exact:
                offer.feedback.give_back_owned_(taken.indices, taken.values)
            padded = torch.nn.functional.pad(message, (0, max(lengths) - message.numel()))
        with self._time("exchange"):
            gathered = self._peers.gather(padded)
        with self._time("decode"):
            messages = [row[:length] for row, length in zip(gathered, lengths, strict=True)]
            return self._wire.decode(messages, forms, offer.step)

    def _passed_on(self, form: Form) -> int:
        """Entries that an owner passes on: at most those that it may have received, and all when all were sent."""
        if form.k == form.numel:
            return form.numel
        m = self._peers.size
        return min(form.k, math.ceil((SENT_ENTRIES - (m - 1) / m) * form.k / (m - 1)))

    def cost(self, quota: Quota, excluded: int) -> Cost:
        m, n, form = self._peers.size, quota.numel, quota.whole
        part, range_numel = -(-form.k // m), -(-n // m)
        passed_on = Form(min(range_numel, self._passed_on(form)), range_numel)
        gathered = (m - 1) * (4 * len(_edges(n)) + self._wire.message_bytes(passed_on))
        dealt = (m - 1) * self._wire.message_bytes(Form(part, range_numel))
        sent, summed = gathered + dealt + dense_bytes(excluded, self._peers.size), form.k + m * passed_on.k
        return Cost(sent, 3 * (m - 1), n + range_numel, summed, form.k + passed_on.k, gathered, dealt)


def _edges(n: int) -> list[int]:
    """Where the buckets of n entries start, and n."""
    return [*range(0, n, max(1, -(-n // BUCKETS))), n]


def _length(region: slice) -> int:
    return region.stop - region.start
