"""One small training on a cluster, and what its links must count: for forked ranks and for launched jobs."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cluster import Counters, interface_counters
from tests.engines import build_config, build_engine, flat_params, train

STEPS = 5
# Packets of small messages (the agreement that a gradient is finite, lengths, gloo's own) between two ranks in a step:
# measured are 1000 to 1300 bytes.
SMALL_BYTES = 2000


def measured(work: Callable[[], Any]) -> tuple[float, Counters, Any]:
    """Seconds of `work`, which all ranks do together, and what crossed this host's link meanwhile."""
    dist.barrier()
    before = interface_counters()
    dist.barrier()  # nobody sends before all have read
    started = time.perf_counter()
    result = work()
    dist.barrier()  # nobody reads while others still send
    return time.perf_counter() - started, interface_counters().since(before), result


def train_measured(section: dict[str, Any]) -> dict[str, Any]:
    """Some steps of a model of 1.5 M parameters; what this rank reports, and what its host's link counted."""
    layers = [torch.nn.Linear(17, 1000), torch.nn.Tanh(), torch.nn.Linear(1000, 1500), torch.nn.Linear(1500, 5)]
    torch.manual_seed(0)
    engine = build_engine(
        build_config(optimizer="SGD", section=section, zero_optimization={"reduce_bucket_size": 10**7}),
        model=torch.nn.Sequential(*layers),
    )
    train(engine, 1)  # the first step also makes connections
    stats = engine.compressed_communication.stats
    before = stats.total.inter_node_bytes
    _, added, _ = measured(lambda: train(engine, STEPS, start=1))
    return {
        "reported": stats.total.inter_node_bytes - before,
        "sent": added.sent,
        "exchanges": stats.total.exchanges,
        "dense_over_wire": stats.total.dense_over_wire,
        "params": hashlib.sha256(flat_params(engine).numpy().tobytes()).hexdigest(),
    }


def check(ranks: list[dict[str, Any]], hosts: int) -> None:
    """That every rank exchanged, all replicas agree, and the links carried what was reported."""
    ranks_per_host = len(ranks) // hosts
    small = SMALL_BYTES * STEPS * ranks_per_host * (hosts - 1)
    for host in range(hosts):
        members = ranks[host * ranks_per_host : (host + 1) * ranks_per_host]
        reported = sum(rank["reported"] for rank in members)
        assert small < 0.02 * reported
        for rank in members:
            assert reported <= rank["sent"] <= 1.02 * reported + small
    assert all(rank["exchanges"] == STEPS + 1 for rank in ranks)
    assert all(rank["params"] == ranks[0]["params"] for rank in ranks)
