"""The arguments by which `plan` and `simulate` are told of a cluster and a model."""

from __future__ import annotations

import argparse
import math
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from .command import CommandError

if TYPE_CHECKING:
    from ..planner import Job, Speeds

UNUSABLE = 3
STATUSES = f"""\
exit status:
  0  done
  2  the command line cannot be understood
  {UNUSABLE}  the probe's file cannot be used
"""


def add_cluster_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--model-size", type=count, required=True, metavar="N", help="trained parameters, such as 7e9")
    parser.add_argument("--nodes", type=several, required=True)
    parser.add_argument("--ranks-per-node", type=count, required=True)
    speeds = parser.add_mutually_exclusive_group(required=True)
    speeds.add_argument("--probe", type=Path, metavar="FILE", help="what `ds_sparse probe` wrote")
    speeds.add_argument("--gbit-per-second", type=positive, help="of a node's link to the others; its ranks share it")
    parser.add_argument(
        "--latency-us", type=positive, default=100.0, help="with --gbit-per-second: of a small message (%(default)g)"
    )
    parser.add_argument(
        "--gradient-bytes", type=int, choices=(2, 4), default=2,
        help="of an element that DeepSpeed sends: 2 in bf16 and fp16, 4 in fp32 (%(default)d)",
    )  # fmt: skip


def job_of(arguments: Namespace) -> Job:
    from ..planner import Job

    return Job(arguments.model_size, arguments.nodes, arguments.ranks_per_node, arguments.gradient_bytes)


def speeds_of(arguments: Namespace) -> Speeds:
    """Raises CommandError where the probe's file cannot be used."""
    from ..config import LinkSettings
    from ..planner import ProbeError, Speeds

    if arguments.probe is None:
        return Speeds(LinkSettings(gbit_per_second=arguments.gbit_per_second, latency_us=arguments.latency_us))
    try:
        return Speeds.from_probe(arguments.probe)
    except ProbeError as error:
        raise CommandError(UNUSABLE, str(error)) from error


def assumptions(job: Job, speeds: Speeds) -> list[str]:
    """What every prediction rests on."""
    link, measured = speeds.link, "measured" if speeds.adam is not None else "typical of one CPU core"
    inside = "taken as free" if speeds.node is None else f"{speeds.node.gbit_per_second:.3g} Gbit/s a rank"
    return [
        f"{job.nodes} nodes of {job.ranks_per_node} ranks; a node's link carries {link.gbit_per_second:.3g} Gbit/s "
        f"each way at {link.latency_us:.3g} us, shared by its ranks; inside a node: {inside}",
        "messages travel in rings, and nothing overlaps with computing; the network has no other users and no "
        "bottleneck but the nodes' links",
        f"work to select, encode and add: {measured}",
        "no parameter is excluded from compression, and everything has settled: no dense steps of a warm-up",
    ]


def count(text: str) -> int:
    """A whole number from 1, also as 7e9."""
    value = positive(text)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(value)


def several(text: str) -> int:
    """A number of nodes between which there is something to compress."""
    value = count(text)
    if value == 1:
        raise argparse.ArgumentTypeError("with 1 node nothing crosses nodes, and nothing is compressed")
    return value


def positive(text: str) -> float:
    value = _number(text)
    if not (0 < value < math.inf):
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value


def density(text: str) -> float:
    value = _number(text)
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is no density: allowed is above 0, up to 1")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
