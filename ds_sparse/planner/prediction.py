"""What a step of each method will take on a cluster: seconds, bytes and memory, by the cost model of `costs.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from ..compressors import Quota, build_compressor
from ..config import SECTION, parse
from ..costs import Cost, dense_cost
from ..exchange import EXCHANGES
from ..links import Link
from .speeds import Speeds

DEEPSPEED_ALONE, DENSE = "DeepSpeed alone", "dense"
EXCHANGE_TYPES = ("all_gather", "reduce_scatter")
VALUE_DTYPES = ("fp32", "bf16", "int8", "int4")
# Bytes that the optimizer's side keeps for an element of a shard: fp32 parameters, and both moments of Adam.
ADAM_BYTES = 12
# What a method keeps beside the fp32 parameters: moments, residual, a momentum of its own.
METHOD_BYTES = {"sparse_momentum": ADAM_BYTES + 8, "sparse_gradient": 4 + 8}
OWNED_BYTES = 4  # the second residual of reduce_scatter
METHODS = tuple(METHOD_BYTES)


@dataclass(frozen=True)
class Job:
    """What is trained, and where.

    Attributes:
        model_size: trained parameters.
        gradient_bytes: of an element of the gradients and parameters that DeepSpeed sends, 2 in bf16 and fp16.
    """

    model_size: int
    nodes: int
    ranks_per_node: int
    gradient_bytes: int = 2

    @property
    def shard(self) -> int:
        """Parameters of a rank whose node shares the state."""
        return -(-self.model_size // self.ranks_per_node)

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


class Row(NamedTuple):
    """One way to communicate, for each step and rank.

    Attributes:
        method: DEEPSPEED_ALONE, or a method of the configuration.
        seconds: predicted, of all communication and what belongs to it.
        update_seconds: of the optimizer's step.
        sent_bytes: across nodes.
        state_bytes: optimizer's state and residuals in memory.
    """

    method: str
    exchange: str
    density: float
    value_dtype: str
    seconds: float
    update_seconds: float
    sent_bytes: int
    state_bytes: int

    @property
    def total(self) -> float:
        return self.seconds + self.update_seconds


@dataclass(frozen=True)
class Peers:
    """Stands in for a `Link` where costs are asked for and nothing is sent."""

    size: int
    rank: int = 0


def exchange_cost(job: Job, exchange: str, density: float, value_dtype: str) -> Cost:
    """Of one exchange between the nodes."""
    config = parse(_section("sparse_gradient", exchange, density, value_dtype))
    quota = Quota(build_compressor(config.compressor), density, job.shard)
    return EXCHANGES[exchange](cast(Link, Peers(job.nodes)), config.exchange).cost(quota, 0)


def ring_cost(job: Job) -> Cost:
    """What the link of a node carries when ZeRO-1 runs over all ranks in one ring, which enters each node once.

    Gradients are all-reduced and parameters all-gathered.
    """
    around = (job.ranks - 1) * job.gradient_bytes * job.model_size // job.ranks
    return Cost(3 * around, 3 * (job.ranks - 1))


def level1_seconds(job: Job, speeds: Speeds) -> float:
    """Inside the node: the same collectives over its ranks."""
    if speeds.node is None:
        return 0.0
    inside = Job(job.model_size, 1, job.ranks_per_node, job.gradient_bytes)
    return ring_cost(inside).seconds(speeds.node, 1)


def predict(
    job: Job, speeds: Speeds, methods: Sequence[str] = METHODS, densities: Sequence[float] = (0.01,)
) -> list[Row]:
    """Every way to communicate; dense ones first."""
    rows = [_deepspeed_alone(job, speeds), _two_levels(job, speeds, DENSE, DENSE, 1.0, "fp32")]
    for method in methods:
        for density in densities:
            for exchange in EXCHANGE_TYPES:
                rows += [_two_levels(job, speeds, method, exchange, density, dtype) for dtype in VALUE_DTYPES]
    return rows


def _deepspeed_alone(job: Job, speeds: Speeds) -> Row:
    cost, shard = ring_cost(job), -(-job.model_size // job.ranks)
    seconds = cost.seconds(speeds.link, 1)
    update, sent = (speeds.adam or 0.0) * shard, cost.sent // job.ranks_per_node
    return Row(DEEPSPEED_ALONE, "ring", 1.0, "", seconds, update, sent, ADAM_BYTES * shard)


def _two_levels(job: Job, speeds: Speeds, method: str, exchange: str, density: float, value_dtype: str) -> Row:
    if method == DENSE:
        cost, kept = dense_cost(job.shard, job.nodes), ADAM_BYTES
    else:
        cost = exchange_cost(job, exchange, density, value_dtype)
        kept = METHOD_BYTES[method] + OWNED_BYTES * (exchange == "reduce_scatter")
    seconds = level1_seconds(job, speeds) + cost.seconds(speeds.link, job.ranks_per_node, speeds.given)
    update = (speeds.adam or 0.0) * job.shard
    return Row(method, exchange, density, value_dtype, seconds, update, cost.sent, kept * job.shard)


def dense_row(rows: Sequence[Row]) -> Row:
    """The faster of the dense ways."""
    return min((row for row in rows if row.method in (DEEPSPEED_ALONE, DENSE)), key=lambda row: row.total)


def best_row(rows: Sequence[Row], density: float) -> Row:
    """The fastest of all at this density; the less is sent the faster, so that densities cannot be compared by time."""
    compressed = [row for row in rows if row.method not in (DEEPSPEED_ALONE, DENSE) and row.density == density]
    return min([dense_row(rows), *compressed], key=lambda row: row.total)


def ready_section(row: Row, speeds: Speeds) -> dict[str, Any]:
    """What belongs into ds_config.json to run a row."""
    if row.method == DEEPSPEED_ALONE:
        return {SECTION: {"enabled": False}}
    if row.method == DENSE:
        return {SECTION: {"method": DENSE}}
    section = _section(row.method, row.exchange, row.density, row.value_dtype)
    link = {name: float(f"{value:.3g}") for name, value in speeds.link.model_dump().items()}
    section["exchange"]["link"] = link
    return {SECTION: section}


def _section(method: str, exchange: str, density: float, value_dtype: str) -> dict[str, Any]:
    return {
        "method": method,
        "compressor": {"density": density},
        "exchange": {"type": exchange, "value_dtype": value_dtype},
    }
