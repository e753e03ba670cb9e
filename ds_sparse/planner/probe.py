"""Measures the links of a cluster and the work of its devices, on all ranks at the same time as training would."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .. import ops
from .._version import __version__
from ..accounting import CommStats
from ..fallback import Stopwatch
from ..links import Link
from ..payload import Form, Payload
from ..topology import build_topology
from ..wire import Wire

SENT_BYTES = tuple(1 << power for power in (12, 16, 18, 20, 22, 24, 26))  # by each rank, in one collective
LONG_SECONDS = 0.05  # no larger size after one that took longer
REPEATS = 5
NUMEL, ENTRIES = 1 << 22, 1 << 16  # of the shard that is worked on
STEPS = 10  # of the progress bar: three collectives on two links, and four kinds of work

Report = dict[str, Any]
Advance = Callable[[str], None]


class Collective(NamedTuple):
    """`build` gives the call with which each of m ranks sends about so many bytes, and how many they are."""

    name: str
    rounds: int  # of m - 1 messages that wait for one another
    build: Callable[[Link, int, torch.device], tuple[Callable[[], object], int]]


def _all_reduce(link: Link, sent: int, device: torch.device) -> tuple[Callable[[], object], int]:
    numel = max(1, sent * link.size // (8 * (link.size - 1)))
    tensor = torch.zeros(numel, device=device)
    return lambda: link.sum_(tensor), 8 * (link.size - 1) * numel // link.size


def _all_gather(link: Link, sent: int, device: torch.device) -> tuple[Callable[[], object], int]:
    numel = max(1, sent // (link.size - 1))
    tensor = torch.zeros(numel, dtype=torch.uint8, device=device)
    return lambda: link.gather(tensor), (link.size - 1) * numel


def _all_to_all(link: Link, sent: int, device: torch.device) -> tuple[Callable[[], object], int]:
    numel = max(1, sent // (link.size - 1))
    part = torch.zeros(numel, dtype=torch.uint8, device=device)
    return lambda: link.deal([part] * link.size, [numel] * link.size), (link.size - 1) * numel


COLLECTIVES = (
    Collective("all_reduce", 2, _all_reduce),
    Collective("all_gather", 1, _all_gather),
    Collective("all_to_all", 1, _all_to_all),
)


class Measured(NamedTuple):
    """Of each collective on a link between `others` and this rank: (bytes sent by a rank, seconds), by size."""

    name: str
    others: int
    points: dict[str, list[tuple[int, float]]]

    def settings(self, sharing: int) -> dict[str, float]:
        """Latency and bandwidth of a link that `sharing` ranks used at once."""
        rounds = {collective.name: collective.rounds * self.others for collective in COLLECTIVES}
        latencies = [points[0][1] / rounds[name] for name, points in self.points.items()]
        rate = sharing * self._rate("all_reduce")
        return {"latency_us": 1e6 * statistics.median(latencies), "gbit_per_second": 8e-9 * rate}

    def over_all_reduce(self, collective: str) -> float:
        """How much longer a byte takes."""
        return self._rate("all_reduce") / self._rate(collective)

    def _rate(self, collective: str) -> float:
        """Bytes a second: what was sent more by the time it took more. What all sizes take, bursts too, falls out."""
        smaller, larger = self.points[collective][-2:]
        sent, seconds = (after - before for before, after in zip(smaller, larger, strict=True))
        return sent / seconds if seconds > 0 else larger[0] / larger[1]

    def report(self) -> list[Report]:
        return [
            {"link": self.name, "collective": collective, "sent_bytes": sent, "seconds": seconds}
            for collective, points in self.points.items()
            for sent, seconds in points
        ]


@contextmanager
def process_group() -> Iterator[torch.device]:
    """The default group of a launched job, made and taken down unless there is one; yields this rank's device."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if dist.is_initialized():
        yield device
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def run_probe(ranks_per_node: int | None = None, advance: Advance = lambda what: None) -> Report:
    """The content of `probe.json`; the same on all ranks. Units stand in the names of its keys.

    A time is the median over repetitions of that of the slowest rank. A bandwidth is the slope between the two largest
    sizes: that of a link is its all-reduce's, and `..._over_all_reduce` is how much longer a byte takes in other
    collectives between nodes. Latency is the time of the smallest size for each round, the median over collectives.

    Args:
        ranks_per_node: as `topology.ranks_per_node` of the configuration.
        advance: called with what comes next, `STEPS` times at most.
    """
    with process_group() as device:
        stats = CommStats()
        topology = build_topology(range(dist.get_world_size()), ranks_per_node)
        probe = _Probe(Link(dist.group.WORLD, "inter", stats), device, advance)
        between = probe.link("inter", Link(topology.peer_group, "inter", stats))
        inside = probe.link("intra", Link(topology.node_group, "intra", stats))
        return {
            "version": __version__,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "kernels": ops.backend_info().get(device.type, {"tier": "reference"})["tier"],
            "nodes": topology.num_nodes,
            "ranks_per_node": topology.ranks_per_node,
            "inter_node": between and between.settings(topology.ranks_per_node),
            "intra_node": inside and inside.settings(1),
            "all_gather_over_all_reduce": between and between.over_all_reduce("all_gather"),
            "all_to_all_over_all_reduce": between and between.over_all_reduce("all_to_all"),
            **probe.work(),
            "collectives": [point for one in (between, inside) if one for point in one.report()],
        }


class _Probe:
    def __init__(self, world: Link, device: torch.device, advance: Advance) -> None:
        self._world, self._device, self._advance = world, device, advance

    def _seconds(self, call: Callable[[], object]) -> float:
        """Of one call, after one that warms up."""
        times = []
        for _ in range(REPEATS + 1):
            float(self._world.sum_(torch.zeros(1, device=self._device)))  # all begin together
            stopwatch = Stopwatch(self._device)
            call()
            times.append(stopwatch.stop())
        mine = torch.tensor([seconds() for seconds in times[1:]], dtype=torch.float64, device=self._device)
        return statistics.median(self._world.gather(mine).max(dim=0).values.tolist())

    def link(self, name: str, link: Link) -> Measured | None:
        """All collectives on a link; None for one rank."""
        if link.size == 1:
            return None
        measured = Measured(name, link.size - 1, {})
        for collective in COLLECTIVES:
            self._advance(f"{collective.name}, {name}-node")
            measured.points[collective.name] = self._points(collective, link)
        return measured

    def _points(self, collective: Collective, link: Link) -> list[tuple[int, float]]:
        points: list[tuple[int, float]] = []
        for size in SENT_BYTES:
            call, sent = collective.build(link, size, self._device)
            points.append((sent, self._seconds(call)))
            if points[-1][1] > LONG_SECONDS and len(points) > 2:
                break
        return points

    def work(self) -> Report:
        """Nanoseconds that a rank works for an element, or an entry."""
        generator = torch.Generator().manual_seed(0)
        grad = torch.randn(NUMEL, generator=generator).to(self._device)
        residual, wire, form = torch.zeros_like(grad), Wire("fp32", "smallest"), Form(ENTRIES, NUMEL)
        self._advance("selection")
        select = self._seconds(lambda: ops.ef_topk_(residual, grad, ENTRIES))
        select -= self._seconds(lambda: residual.add_(grad))
        chosen = ops.ef_topk_(residual, grad, ENTRIES)
        payload = Payload(chosen.values.clone(), chosen.indices, form)
        self._advance("encoding")
        encode = self._seconds(lambda: wire.encode_(payload._replace(values=chosen.values.clone()), 0))
        message = wire.encode_(payload, 0)
        self._advance("decoding and adding")

        def add() -> None:
            (decoded,) = wire.decode([message], [form], 0)
            ops.scatter_add_(residual, decoded.indices, decoded.values)

        summed = self._seconds(add)
        return {
            "select_ns_per_element": 1e9 * max(0.0, select) / NUMEL,
            "encode_ns_per_entry": 1e9 * encode / ENTRIES,
            "sum_ns_per_entry": 1e9 * summed / ENTRIES,
            "adam_ns_per_element": 1e9 * self._adam(grad) / NUMEL,
        }

    def _adam(self, grad: torch.Tensor) -> float:
        self._advance("Adam")
        param = torch.nn.Parameter(torch.zeros_like(grad))
        param.grad = grad
        return self._seconds(torch.optim.AdamW([param]).step)
