"""Which clusters are up on this machine, by the names of their namespaces: `dsc.NAME.PART`."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from .tools import ClusterError, call

PREFIX = "dsc"


def names() -> list[str]:
    """Names of the clusters that are up."""
    return sorted({space.split(".")[1] for space in namespaces()})


def reap() -> list[str]:
    """Removes the clusters whose process was killed before it could; returns their names."""
    left = [name for name in names() if name[0].isdigit() and not _owner_lives(name)]
    for name in left:
        remove(name)
    return left


def namespaces() -> list[str]:
    """The namespaces of all clusters."""
    listed = (line.split()[0] for line in call("ip", "netns", "list").splitlines())
    return [space for space in listed if space.startswith(f"{PREFIX}.")]


def _owner_lives(name: str) -> bool:
    pid, born, _ = name.split("-")
    with contextlib.suppress(OSError):
        return birth(int(pid)) == born
    return False


def birth(pid: int) -> str:
    """When a process started, in ticks since boot: with it, a process id is never met twice."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def pid_inside(pid: int) -> int | None:
    """What a process is called in its own namespace of process ids; None when that is the machine's, or it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                _, *outer, inner = line.split()
                return int(inner) if outer else None
    return None


def remove(name: str) -> None:
    """Kills what runs in the namespaces of a cluster and deletes them; its links and bridge go with them."""
    for space in (space for space in namespaces() if space.split(".")[1] == name):
        # Two processes may reap at once: whoever comes second finds nothing, which is what it wants.
        with contextlib.suppress(ClusterError):
            for pid in call("ip", "netns", "pids", space).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            call("ip", "netns", "delete", space)
    if name in names():
        raise ClusterError(f"cluster '{name}' could not be removed: 'ip netns list' shows what is left")
