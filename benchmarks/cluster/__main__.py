"""A cluster of network namespaces on this machine, to run a job over slow or failing links.

In one go, as root:

  python -m benchmarks.cluster run --rate 200mbit -- examples/train_lm.py --steps 50 \\
      --deepspeed_config configs/mstopk_zero1.json

and meanwhile, from another terminal:

  python -m benchmarks.cluster stat             what every host sent and received so far
  python -m benchmarks.cluster shape 50mbit     slower links; `off` for as fast as they go
  python -m benchmarks.cluster cut 1            host 1 loses its link ...
  python -m benchmarks.cluster heal 1           ... and has it back
  python -m benchmarks.cluster loss 1 0.5       half a percent of its frames are lost; 0 for none

By hand, for any other program:

  python -m benchmarks.cluster up --hosts 4 --rate 1gbit
  python -m benchmarks.cluster exec 0 -- torchrun --nnodes 4 --node-rank 0 --master-addr host0 train.py &
  ...                                           likewise on hosts 1, 2 and 3
  python -m benchmarks.cluster down
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from .namespaces import names, reap
from .network import Cluster
from .tools import ClusterError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    # What follows `--` is somebody else's, options and all.
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    parser = _parser()
    args = parser.parse_args(words[:cut])
    args.rest = words[cut + 1 :]
    if args.takes_rest != bool(args.rest):
        parser.error(f"'{args.command}' " + ("needs '--' and what to run" if args.takes_rest else "takes no '--'"))
    try:
        return args.act(args) or 0
    except ClusterError as error:
        print(f"benchmarks.cluster: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(act: Callable[[argparse.Namespace], int | None], text: str, takes_rest: bool = False) -> _Parser:
        added = commands.add_parser(act.__name__.strip("_"), help=text, description=text)
        added.set_defaults(act=act, takes_rest=takes_rest)
        return added

    for added in (
        command(_up, "start a cluster that stays until `down`"),
        command(_run, "start a cluster, run a deepspeed job on it, print what crossed its links", takes_rest=True),
    ):
        added.add_argument("--hosts", type=int, default=2, help="(default: %(default)s)")
        added.add_argument("--rate", help="of every link and direction, as 200mbit or 1gbit (default: unlimited)")
    added.add_argument("--ranks-per-host", type=int, default=2, metavar="N", help="(default: %(default)s)")
    added.add_argument("--launcher", choices=["pdsh", "no_ssh"], default="pdsh", help="(default: %(default)s)")
    _on_a_host(command(_cut, "take a host's link away"))
    _on_a_host(command(_heal, "give a host its link back"))
    _on_a_host(command(_loss, "lose frames from and to a host at random")).add_argument("percent", type=float)
    _on_a_host(command(_exec, "run a program on a host", takes_rest=True))
    command(_shape, "set the rate of all links").add_argument("rate", help="as 200mbit or 1gbit; off for unlimited")
    command(_stat, "print what every host sent and received")
    command(_down, "remove a cluster, and what killed runs left")
    for name, added in commands.choices.items():
        if name in ("up", "down"):
            added.add_argument("--name", default="main", help="of the cluster (default: %(default)s)")
        elif name != "run":
            added.add_argument("--name", help="of the cluster, where several are up")
        if added.get_default("takes_rest"):
            what = "SCRIPT [ARGUMENT ...]" if name == "run" else "PROGRAM [ARGUMENT ...]"
            added.usage = f"{added.format_usage().removeprefix('usage: ').rstrip()} -- {what}"
    return parser


_Parser = argparse.ArgumentParser


def _on_a_host(parser: _Parser) -> _Parser:
    parser.add_argument("host", type=int, help="number of the host, from 0")
    return parser


def _attached(args: argparse.Namespace) -> Cluster:
    """The cluster that is meant: the one named, or the only one."""
    up = names()
    if args.name is None and len(up) != 1:
        what = f"several clusters are up, name one with --name: {', '.join(up)}" if up else "no cluster is up"
        raise ClusterError(what)
    return Cluster.attach(args.name or up[0])


# ---- commands: each is named by its function ------------------------------------------------------------------------


def _up(args: argparse.Namespace) -> None:
    cluster = Cluster(hosts=args.hosts, rate=args.rate, name=args.name).up()
    for host in range(cluster.hosts):
        print(f"{cluster.hostname(host)}  {cluster.address(host)}")


def _run(args: argparse.Namespace) -> int:
    from .jobs import JobError, launch  # imports torch, which the other commands do without

    with Cluster(hosts=args.hosts, rate=args.rate) as cluster:
        print(f"cluster {cluster.name} is up", flush=True)
        started = time.perf_counter()
        try:
            launch(cluster, args.rest, ranks_per_host=args.ranks_per_host, launcher=args.launcher)
            status = 0
        except JobError as error:
            print(f"benchmarks.cluster: {error}", file=sys.stderr)
            status = error.status
        print(f"\n{time.perf_counter() - started:.1f} s, links: {args.rate or 'unlimited'}\n{_table(cluster)}")
    return status


def _cut(args: argparse.Namespace) -> None:
    _attached(args).cut(args.host)


def _heal(args: argparse.Namespace) -> None:
    _attached(args).heal(args.host)


def _loss(args: argparse.Namespace) -> None:
    _attached(args).loss(args.host, args.percent)


def _exec(args: argparse.Namespace) -> int:
    return _attached(args).start(args.host, args.rest).wait()


def _shape(args: argparse.Namespace) -> None:
    _attached(args).shape(None if args.rate == "off" else args.rate)


def _stat(args: argparse.Namespace) -> None:
    print(_table(_attached(args)))


def _down(args: argparse.Namespace) -> None:
    removed = reap()
    if args.name in names():
        Cluster.attach(args.name).down()
        removed.append(args.name)
    if not removed:
        raise ClusterError(f"no cluster '{args.name}' is up; there are: {', '.join(names()) or 'none'}")
    print(f"removed: {', '.join(removed)}")


def _table(cluster: Cluster) -> str:
    rows = [(cluster.hostname(host), cluster.counters(host)) for host in range(cluster.hosts)]
    header = f"{'host':8}{'bytes sent':>18}{'bytes received':>18}"
    return "\n".join([header, *(f"{name:8}{sent:18,}{received:18,}" for name, (sent, received) in rows)])


if __name__ == "__main__":
    sys.exit(main())
