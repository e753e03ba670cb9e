"""What it takes to average 25M gradients over nodes on slow links: ours against dense, DDP's hooks and naive top-k.

    python -m benchmarks.bench_exchange                                     # 4x1 and 2x2, three rates; needs root
    python -m benchmarks.bench_exchange --layouts 2x2 --rates 1gbit --json out.json --plot out.png

Hosts are network namespaces with shaped links (benchmarks/cluster). All rows of a case are run in turn, round by
round; a time is that of the slowest rank, and the median over rounds. Bytes are read from the interface of a host.
Each row starts from a gradient on every rank and ends with the mean on every rank: where a node has several ranks, our
rows and "two-level dense" reduce inside the node before and gather there afterwards.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.cluster import Cluster, interface_counters
from ds_sparse.accounting import CommStats
from ds_sparse.config import parse
from ds_sparse.links import Link
from ds_sparse.methods import Context
from ds_sparse.methods.stream import SparseStream
from ds_sparse.shard import Segment, ShardLayout

COLUMNS = 5000  # of the matrix that PowerSGD approximates
POWERSGD_DENSE = 2  # steps before it compresses, at least
DENSE = "dense all-reduce"
CASE_SECONDS = 1800
Step = Callable[[torch.Tensor], None]


class Place(NamedTuple):
    """Where a rank stands: links over all ranks, over the same shard on other nodes, and inside the node."""

    world: Link
    peers: Link
    node: Link
    numel: int
    stats: CommStats


def dense(place: Place) -> Step:
    return lambda vector: place.world.sum_(vector).div_(place.world.size)


def two_level_dense(place: Place) -> Step:
    def step(vector: torch.Tensor) -> None:
        part = place.peers.sum_(place.node.sum_scatter(vector)).div_(place.world.size)
        vector.copy_(place.node.gather(part).view(-1))

    return step


def bf16_all_reduce(place: Place) -> Step:
    return lambda vector: vector.copy_(place.world.sum_(vector.bfloat16()).div_(place.world.size))


def naive_topk(place: Place, density: float) -> Step:
    """torch.topk with error feedback, all-gather of values and indices, flat over all ranks."""
    residual, k = torch.zeros(place.numel), int(density * place.numel)

    def step(vector: torch.Tensor) -> None:
        residual.add_(vector)
        indices = torch.topk(residual.abs(), k, sorted=False).indices
        values = residual[indices]
        residual[indices] = 0.0
        all_values, all_indices = place.world.gather(values), place.world.gather(indices.int())
        vector.zero_()
        for peer_values, peer_indices in zip(all_values, all_indices, strict=True):
            vector.index_add_(0, peer_indices.long(), peer_values)
        vector.div_(place.world.size)

    return step


def ddp(place: Place, hook: str) -> Step:
    """A backward pass of DistributedDataParallel whose gradient is the vector, at next to no cost of its own."""
    model = torch.nn.Linear(COLUMNS, place.numel // COLUMNS, bias=False)
    wrapped = DistributedDataParallel(model)
    if hook == "bf16":
        # torch refuses the hook by its name where there is no NCCL, though gloo sums bf16 too.
        wrapped.register_comm_hook(None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket))
    elif hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=POWERSGD_DENSE)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    inputs = torch.ones(1, COLUMNS)

    def step(vector: torch.Tensor) -> None:
        wrapped(inputs).sum().backward()
        model.weight.grad = None

    for _ in range(POWERSGD_DENSE + 1 if hook == "powersgd" else 0):  # its first steps are dense, the next allocates
        step(inputs)
    return step


def ours(place: Place, section: dict[str, Any]) -> Step:
    """Level 2 of `sparse_gradient`: error feedback, selection, exchange; and level 1 around it."""
    numel = place.numel // place.node.size
    layout = ShardLayout([Segment("w", numel, dense=False)])
    config = parse({"method": "sparse_gradient", "fallback": "off", **section})
    stream = SparseStream(Context(config, layout, torch.device("cpu"), place.peers, place.node, None, []))
    steps = iter(range(1 << 30))

    def step(vector: torch.Tensor) -> None:
        part = place.node.sum_scatter(vector)
        if place.node.size > 1:
            part.div_(place.node.size)
        stream.mean_(part, next(steps))
        if place.node.size > 1:
            vector.copy_(place.node.gather(part).view(-1))

    return step


def section(density: float, **exchange: Any) -> dict[str, Any]:
    return {"compressor": {"density": density}, "exchange": exchange}


ROWS: dict[str, Callable[[Place], Step]] = {
    DENSE: dense,
    "two-level dense": two_level_dense,
    "bf16 all-reduce": bf16_all_reduce,
    "DDP": lambda place: ddp(place, ""),
    "DDP, bf16 hook": lambda place: ddp(place, "bf16"),
    "DDP, PowerSGD rank 4": lambda place: ddp(place, "powersgd"),
    "naive top-k 1 %": lambda place: naive_topk(place, 0.01),
    "ours, all_gather 1 %": lambda place: ours(place, section(0.01, type="all_gather")),
    "ours, all_gather 1 %, 4 chunks": lambda place: ours(place, section(0.01, type="all_gather", chunks=4)),
    "ours, all_gather 1 %, int8": lambda place: ours(place, section(0.01, type="all_gather", value_dtype="int8")),
    "ours, all_gather 1 %, int4": lambda place: ours(place, section(0.01, type="all_gather", value_dtype="int4")),
    "ours, all_gather 1 %, int32 indices": lambda place: ours(
        place, section(0.01, type="all_gather", index_encoding="int32")
    ),
    "ours, all_gather 0.1 %": lambda place: ours(place, section(0.001, type="all_gather")),
    "ours, reduce_scatter 1 %": lambda place: ours(place, section(0.01, type="reduce_scatter")),
    "ours, reduce_scatter 1 %, int8": lambda place: ours(
        place, section(0.01, type="reduce_scatter", value_dtype="int8")
    ),
}


# ---- on the ranks -----------------------------------------------------------------------------------------------


class Sample(NamedTuple):
    """One call of one row on one rank. Bytes: what the rank counted, and what left its host meanwhile."""

    seconds: float
    counted: int
    interface: int


def measure(rows: list[str], ranks_per_node: int, numel: int, rounds: int) -> dict[str, list[Sample]]:
    """Runs on every rank."""
    torch.set_num_threads(1)
    place = _place(ranks_per_node, numel)
    steps = {name: ROWS[name](place) for name in rows}
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank()))
    vector, samples = torch.empty(numel), {name: [] for name in rows}
    for _ in range(rounds + 1):  # the first round allocates
        for name, step in steps.items():
            vector.copy_(gradient)
            counted = _counted(place)
            dist.barrier()
            sent, begin = interface_counters().sent, time.perf_counter()
            step(vector)
            seconds = time.perf_counter() - begin
            dist.barrier()
            samples[name].append(Sample(seconds, _counted(place) - counted, interface_counters().sent - sent))
    return {name: kept[1:] for name, kept in samples.items()}


def _place(ranks_per_node: int, numel: int) -> Place:
    stats, world, rank = CommStats(), dist.get_world_size(), dist.get_rank()
    nodes = [list(range(first, first + ranks_per_node)) for first in range(0, world, ranks_per_node)]
    columns = [list(column) for column in zip(*nodes, strict=True)]
    node, peers = (_own_group(groups, rank) for groups in (nodes, columns))
    links = Link(dist.group.WORLD, "inter", stats), Link(peers, "inter", stats), Link(node, "intra", stats)
    return Place(*links, numel, stats)


def _own_group(groups: list[list[int]], rank: int) -> Any:
    made = [dist.new_group(group) for group in groups]
    return next(group for group, ranks in zip(made, groups, strict=True) if rank in ranks)


def _counted(place: Place) -> int:
    place.stats.close(exchanged=True, dense_bytes=0, seconds=0.0, density=1.0)
    return place.stats.total.inter_node_bytes


# ---- tables -----------------------------------------------------------------------------------------------------


def summarize(ranks: list[dict[str, list[Sample]]], ranks_per_node: int) -> dict[str, dict[str, float]]:
    """Of each row: seconds of the slowest rank, bytes a host sent and bytes its ranks counted; medians over rounds."""
    result = {}
    for name in ranks[0]:
        rounds = list(zip(*(rank[name] for rank in ranks), strict=True))
        host = [samples[:ranks_per_node] for samples in rounds]
        result[name] = {
            "seconds": statistics.median(max(sample.seconds for sample in samples) for samples in rounds),
            "host_bytes": statistics.median(samples[0].interface for samples in host),
            "counted_bytes": statistics.median(sum(sample.counted for sample in samples) for samples in host),
        }
    return result


def table(layout: str, rate: str, rows: dict[str, dict[str, float]]) -> str:
    lines = [f"\n{layout} at {rate}", f"{'':36}{'s':>9}{'dense/it':>10}{'MB a host':>11}{'counted':>9}"]
    for name, row in rows.items():
        share = row["counted_bytes"] / row["host_bytes"] if row["host_bytes"] and row["counted_bytes"] else float("nan")
        speedup = rows[DENSE]["seconds"] / row["seconds"]
        lines.append(f"{name:36}{row['seconds']:9.3f}{speedup:10.1f}{row['host_bytes'] / 1e6:11.2f}{share:9.1%}")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layouts", nargs="+", default=["4x1", "2x2"], help="hosts x ranks a host")
    parser.add_argument("--rates", nargs="+", default=["1gbit", "200mbit", "unshaped"])
    parser.add_argument("--elements", type=float, default=25e6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", nargs="+", default=[], help=f"parts of the names of rows: {', '.join(ROWS)}")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--plot", type=Path, help="draw time against bandwidth here")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    rows = [name for name in ROWS if name == DENSE or not args.rows or any(part in name for part in args.rows)]
    results: dict[str, dict[str, Any]] = {}
    for layout in args.layouts:
        hosts, per_host = map(int, layout.split("x"))
        for rate in args.rates:
            with Cluster(hosts=hosts, rate=None if rate == "unshaped" else rate) as cluster:
                ranks = cluster.run_ranks(
                    per_host, measure, rows, per_host, int(args.elements), args.rounds, timeout=CASE_SECONDS
                )
            results.setdefault(layout, {})[rate] = summarize(ranks, per_host)
            print(table(layout, rate, results[layout][rate]), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"elements": int(args.elements), "cases": results}, indent=1) + "\n")
    if args.plot:
        from benchmarks.plots import time_against_bandwidth

        time_against_bandwidth(results, args.plot)


if __name__ == "__main__":
    main()
