"""How far the planner's predictions are from what is measured, on hosts that are network namespaces; needs root.

    python -m benchmarks.bench_plan
    python -m benchmarks.bench_plan --hosts 2 --rates 200mbit --json out.json

At every point the cluster is probed first, as `ds_sparse probe` would, and predictions follow from that probe alone.
What is measured are rows of benchmarks/bench_exchange.py. Judge by the rows that the link bounds: where it is fast, the
hosts of a small machine fight for its cores, which no model of a cluster has in it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.bench_exchange import measure, summarize
from benchmarks.cluster import Cluster
from ds_sparse.costs import dense_cost
from ds_sparse.planner import Job, Speeds, exchange_cost, run_probe

# row of bench_exchange -> exchange; None: dense
ROWS = {
    "two-level dense": None,
    "ours, all_gather 1 %": "all_gather",
    "ours, reduce_scatter 1 %": "reduce_scatter",
}


class Error(NamedTuple):
    """Of one prediction."""

    row: str
    predicted: float
    measured: float

    @property
    def relative(self) -> float:
        return self.predicted / self.measured - 1.0


def probe() -> dict[str, Any]:
    """Runs on every rank."""
    torch.set_num_threads(1)
    return run_probe()


def compare(
    hosts: int, rate: str, numel: int, rounds: int, rows: Sequence[str] = tuple(ROWS)
) -> tuple[Speeds, list[Error]]:
    """What one point's probe says, and the error of each row's prediction from it."""
    shaped = None if rate == "unshaped" else rate
    with Cluster(hosts=hosts, rate=shaped) as cluster, tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "probe.json"
        file.write_text(json.dumps(cluster.run_ranks(1, probe)[0]))
        speeds = Speeds.from_probe(file)
        measured = summarize(cluster.run_ranks(1, measure, list(rows), 1, numel, rounds), 1)
    job = Job(numel, hosts, 1)
    errors = []
    for row in rows:
        exchange = ROWS[row]
        cost = exchange_cost(job, exchange, 0.01, "fp32") if exchange else dense_cost(numel, hosts)
        errors.append(Error(row, cost.seconds(speeds.link, 1, speeds.given), measured[row]["seconds"]))
    return speeds, errors


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--rates", nargs="+", default=["50mbit", "200mbit", "1gbit", "unshaped"])
    parser.add_argument("--elements", type=float, default=25e6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    cases: list[dict[str, Any]] = []
    print(f"{'hosts':>5} {'rate':>9} {'probed Gbit/s':>14} {'us':>7}  {'row':28}{'predicted s':>12}{'measured s':>12}")
    for hosts in args.hosts:
        for rate in args.rates:
            speeds, errors = compare(hosts, rate, int(args.elements), args.rounds)
            link = speeds.link
            for error in errors:
                place = f"{hosts:5} {rate:>9} {link.gbit_per_second:14.3g} {link.latency_us:7.0f}"
                times = f"{error.predicted:12.4f}{error.measured:12.4f}{error.relative:+8.0%}"
                print(f"{place}  {error.row:28}{times}", flush=True)
                cases.append({"hosts": hosts, "rate": rate, **link.model_dump(), **error._asdict()})
    if args.json:
        args.json.write_text(json.dumps({"elements": int(args.elements), "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
