"""The system's programs that a cluster is made of: which are missing, and what they complain of."""

from __future__ import annotations

import os
import shutil
import subprocess

# program -> Debian package
PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "mount": "mount",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "nft": "nftables",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "pdsh": "pdsh",
}
NETWORK = ("ip", "tc", "mount", "nsenter", "setpriv")  # what every cluster needs
LOSS = ("nft",)
PDSH = ("ssh", "ssh-keygen", "sshd", "pdsh")

# Administrators' programs are not on every user's path.
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])


class ClusterError(RuntimeError):
    """A cluster cannot be made, or one of its parts cannot be changed; says what to do where that is known."""


def missing(*programs: str) -> str | None:
    """Why a cluster that uses `programs` cannot be made, and what to do; None when nothing is missing."""
    if not os.path.exists("/proc/self/ns/net"):
        return "a cluster of network namespaces needs Linux"
    if os.geteuid() != 0:
        return "only root may create network namespaces: run this as root, with sudo for example"
    absent = [program for program in programs if shutil.which(program, path=_PATH) is None]
    if absent:
        packages = " ".join(dict.fromkeys(PACKAGES[program] for program in absent))
        return f"{', '.join(absent)} not found: apt-get install --no-install-recommends {packages}"
    return None


def require(*programs: str) -> None:
    """Raises ClusterError when one of `programs` is missing, or the right to use them."""
    reason = missing(*programs)
    if reason is not None:
        raise ClusterError(reason)


def path_of(program: str) -> str:
    """The absolute path of a program."""
    require(program)
    return str(shutil.which(program, path=_PATH))


def call(program: str, *arguments: object, stdin: str | None = None) -> str:
    """Runs a program to its end and returns what it printed.

    Raises:
        ClusterError: it is missing or failed; with the command and its complaint.
    """
    words = [str(argument) for argument in arguments]
    done = subprocess.run([path_of(program), *words], input=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"'{' '.join([program, *words])}' failed: {done.stderr.strip()}")
    return done.stdout
