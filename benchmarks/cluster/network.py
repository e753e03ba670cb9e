"""Cluster: hosts, switch and links made of network namespaces, without any state but the kernel's.

    host i    namespace `dsc.NAME.hosti`: interface eth0, 10.77.0.(11+i)/24; its own host name, /etc/hosts, /dev/shm
              and process ids
    switch    namespace `dsc.NAME.switch`: bridge br0 with port pi for host i

Nothing is joined to the machine's own network, so clusters may use the same addresses side by side.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import tools
from .namespaces import PREFIX, birth, names, namespaces, pid_inside, reap, remove
from .tools import ClusterError, call

_INIT = Path(__file__).with_name("init.py")
_MAX_HOSTS = 200  # addresses end at 254
_serial = itertools.count()


class Counters(NamedTuple):
    """Bytes that an interface sent and received, Ethernet, IP and TCP headers included.

    Segments that the kernel hands over as one frame of up to 64 KiB count one set of headers.
    """

    sent: int
    received: int

    def since(self, earlier: Counters) -> Counters:
        """What was added after `earlier`."""
        return Counters(self.sent - earlier.sent, self.received - earlier.received)


def interface_counters(interface: str = "eth0", process: int | str = "self") -> Counters:
    """Counters of an interface in the network that a process (by default this one) is in."""
    for line in Path(f"/proc/{process}/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            fields = numbers.split()
            return Counters(sent=int(fields[8]), received=int(fields[0]))
    raise ClusterError(f"there is no interface {interface} here: this process is in no host of a cluster")


class Cluster:
    """Hosts on one switch. A context manager: on leaving, everything is removed and what still runs is killed.

    Args:
        hosts: how many.
        rate: of every link, in each direction, in tc's words: "200mbit", "1gbit"; None for as fast as it goes. It
            counts bytes on the wire: TCP carries about 95 % of it.
        name: for a cluster that outlives this process. Without one, the name is this process's own, and `reap`
            removes the cluster once the process is gone.

    Raises:
        ClusterError: of every method, when the system refuses; names the command and the reason.
    """

    def __init__(self, hosts: int = 2, rate: str | None = None, name: str | None = None) -> None:
        if not 1 <= hosts <= _MAX_HOSTS:
            raise ClusterError(f"hosts is {hosts}; allowed is 1 to {_MAX_HOSTS}")
        if name is not None and not re.fullmatch("[A-Za-z][A-Za-z0-9_-]*", name):
            raise ClusterError(f"name is '{name}'; allowed are letters, digits, '-' and '_', a letter first")
        self.hosts, self._rate = hosts, rate
        self.name = name or f"{os.getpid()}-{birth(os.getpid())}-{next(_serial)}"
        self._inits: dict[int, int] = {}
        self._holders: list[subprocess.Popen[str]] = []

    # ---- up and down --------------------------------------------------------------------------------------------

    def up(self) -> Cluster:
        """Makes switch, hosts and links; first removes what killed processes left."""
        tools.require(*tools.NETWORK)
        reap()
        if self.name in names():
            raise ClusterError(f"a cluster '{self.name}' is up already: take it down first, or choose another name")
        try:
            self._build()
        except BaseException:
            self.down()
            raise
        return self

    def down(self) -> None:
        """Kills every process of the hosts and removes hosts, links and switch."""
        remove(self.name)
        for holder in self._holders:
            holder.communicate()
        self._holders.clear()
        self._inits.clear()

    def __enter__(self) -> Cluster:
        return self.up()

    def __exit__(self, *_: object) -> None:
        self.down()

    @classmethod
    def attach(cls, name: str) -> Cluster:
        """The cluster of this name that is up, whoever made it."""
        if name not in names():
            raise ClusterError(f"no cluster '{name}' is up; there are: {', '.join(names()) or 'none'}")
        cluster = cls(hosts=sum(space.startswith(f"{PREFIX}.{name}.host") for space in namespaces()))
        cluster.name = name
        return cluster

    def _build(self) -> None:
        switch = self._space("switch")
        call("ip", "netns", "add", switch)
        call("ip", "-n", switch, "link", "add", "br0", "type", "bridge", "forward_delay", 0)
        call("ip", "-n", switch, "link", "set", "br0", "up")
        for host in range(self.hosts):
            self._build_host(host, switch)
        self.shape(self._rate)
        self._holders = [self._start_init(host) for host in range(self.hosts)]
        for holder in self._holders:
            assert holder.stdout is not None
            if holder.stdout.readline() != "ready\n":
                raise ClusterError(f"a host did not start: {holder.communicate()[1].strip()}")

    def _build_host(self, host: int, switch: str) -> None:
        space, port = self._space(f"host{host}"), f"p{host}"
        call("ip", "netns", "add", space)
        call("ip", "link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", port, "netns", switch)
        call("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
        call("ip", "-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        call("ip", "-n", space, "link", "set", "lo", "up")
        call("ip", "-n", space, "link", "set", "eth0", "up")

    def _start_init(self, host: int) -> subprocess.Popen[str]:
        hosts = ["127.0.0.1 localhost", *(f"{self.address(i)} {self.hostname(i)}" for i in range(self.hosts))]
        command = [tools.path_of("ip"), "netns", "exec", self._space(f"host{host}")]
        command += [sys.executable, "-I", "-S", str(_INIT), self.hostname(host), "\n".join(hosts) + "\n"]
        # A session of its own: an interrupt at the terminal must not take the hosts from under a job before its end.
        return subprocess.Popen(
            command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )

    # ---- links --------------------------------------------------------------------------------------------------

    def shape(self, rate: str | None) -> None:
        """Sets the rate of all links, in each direction; None for as fast as it goes."""
        # A burst below one frame of the kernel's (64 KiB) would have every frame cut up, at the cost of CPU time.
        words = ["noqueue"] if rate is None else ["tbf", "rate", rate, "burst", "128k", "latency", "50ms"]
        for host in range(self.hosts):
            call("tc", "-n", self._space(f"host{host}"), "qdisc", "replace", "dev", "eth0", "root", *words)
            call("tc", "-n", self._space("switch"), "qdisc", "replace", "dev", f"p{host}", "root", *words)

    def cut(self, host: int) -> None:
        """Takes the link of a host away, as when its cable is pulled. No process is told."""
        call("ip", "-n", self._space("switch"), "link", "set", self._port(host), "down")

    def heal(self, host: int) -> None:
        """Brings the link of a host back."""
        call("ip", "-n", self._space("switch"), "link", "set", self._port(host), "up")

    def loss(self, host: int, percent: float) -> None:
        """Drops this share of the frames from and to a host, at random; 0 for none.

        A frame is what the kernel hands over at once, up to 44 TCP segments. How much a loss costs depends more on
        the congestion control than on the share: name it beside a measurement.
        """
        if not 0 <= percent <= 100:
            raise ClusterError(f"loss is {percent} percent; allowed is 0 to 100")
        port, table = self._port(host), f"table netdev loss{host}"
        rules = f"{table} {{}}\ndelete {table}\n"  # made first, so that there is one to delete
        dropped = round(percent * 100)  # of 10000
        if dropped:
            drop = f"numgen random mod 10000 >= {10000 - dropped} counter drop"
            chains = "\n".join(
                f'chain {hook} {{ type filter hook {hook} device "{port}" priority 0; {drop}; }}'
                for hook in ("ingress", "egress")
            )
            rules += f"{table} {{\n{chains}\n}}\n"
        call("ip", "netns", "exec", self._space("switch"), tools.path_of("nft"), "-f", "-", stdin=rules)

    def counters(self, host: int) -> Counters:
        """What a host sent and received so far, read inside it."""
        return interface_counters(process=self._init(host))

    # ---- hosts --------------------------------------------------------------------------------------------------

    def address(self, host: int) -> str:
        """IPv4 address of a host."""
        return f"10.77.0.{11 + host}"

    def hostname(self, host: int) -> str:
        """Name of a host, which the others resolve to its address."""
        return f"host{host}"

    def start(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a program on a host; `options` are those of Popen. When what is returned is killed, the program ends.

        What stands between here and the program passes no signal on, so the program gets SIGTERM at its death.
        """
        enter = [tools.path_of("nsenter"), "--target", str(self._init(host)), "--all", "--"]
        enter += ["env", f"--chdir={options.pop('cwd', os.getcwd())}", "setpriv", "--pdeathsig", "TERM", "--"]
        return subprocess.Popen([*enter, *command], **options)

    def enter(self, host: int) -> None:
        """Moves the calling process into a host, for good: its network and its host name.

        Files and process ids stay those of the machine, and threads that it already has stay outside.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        for kind in ("net", "uts"):
            with open(f"/proc/{self._init(host)}/ns/{kind}") as namespace:
                if libc.setns(namespace.fileno(), 0):
                    raise ClusterError(f"cannot enter {self.hostname(host)}: {os.strerror(ctypes.get_errno())}")

    def run_ranks(self, ranks_per_host: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """`function(*args)` on forked ranks of every host with an initialised gloo group; the results by rank.

        The ranks see the environment of a `deepspeed` job: every host is a node. Inside `function` this cluster may be
        used: a rank can cut a link at the step it wants. `options` are those of `tests.ranks.run_ranks`.

        Raises:
            tests.ranks.RankError: a rank raised, died, or did not finish in time.
        """
        from tests.ranks import run_ranks  # imports torch, which the other commands do without

        def enter(rank: int) -> None:
            host, local = divmod(rank, ranks_per_host)
            self.enter(host)
            os.environ.update(
                LOCAL_RANK=str(local), LOCAL_SIZE=str(ranks_per_host), CROSS_RANK=str(host), CROSS_SIZE=str(self.hosts),
                MASTER_ADDR=self.address(0), GLOO_SOCKET_IFNAME="eth0",
            )  # fmt: skip

        for host in range(self.hosts):
            self._init(host)  # found once here rather than in every rank
        return run_ranks(self.hosts * ranks_per_host, function, *args, enter=enter, **options)

    def _space(self, part: str) -> str:
        return f"{PREFIX}.{self.name}.{part}"

    def _port(self, host: int) -> str:
        if not 0 <= host < self.hosts:
            raise ClusterError(f"host is {host}; this cluster has 0 to {self.hosts - 1}")
        return f"p{host}"

    def _init(self, host: int) -> int:
        """Process id, on the machine, of the first process of a host."""
        if host not in self._inits:
            self._port(host)
            found = call("ip", "netns", "pids", self._space(f"host{host}")).split()
            first = [int(pid) for pid in found if pid_inside(int(pid)) == 1]
            if not first:
                raise ClusterError(f"{self.hostname(host)} is not running: take the cluster down and up again")
            (self._inits[host],) = first
        return self._inits[host]
