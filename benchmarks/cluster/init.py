"""The first process of a host: gives it a name, files and process ids of its own, and waits for its orphans.

Started inside the host's network namespace by `ip netns exec`, which has given it its own mounts already:

    python -I -S init.py HOSTNAME ETC_HOSTS

Prints `ready` once the host is usable. Killing it kills every process of the host.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys

NAMESPACES = 0x04000000 | 0x08000000 | 0x20000000  # CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID of <sched.h>


def prepare(hostname: str, etc_hosts: str) -> None:
    """Host name, /proc, /dev/shm and /etc/hosts of this host alone."""
    socket.sethostname(hostname)
    subprocess.run(["mount", "-t", "proc", "proc", "/proc"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)
    own = "/dev/shm/etc_hosts"
    with open(own, "w") as file:
        file.write(etc_hosts)
    subprocess.run(["mount", "--bind", own, "/etc/hosts"], check=True)
    os.unlink(own)  # it lives on under its other name


def wait_for_orphans() -> None:
    """What every first process has to do; never returns."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        signal.sigwait({signal.SIGCHLD})


def main() -> None:
    """Makes the namespaces; the process ids of the new one begin with the child."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NAMESPACES):
        raise OSError(ctypes.get_errno(), "cannot make namespaces for a host")
    child = os.fork()
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0)
    prepare(*sys.argv[1:])
    print("ready", flush=True)
    wait_for_orphans()


if __name__ == "__main__":
    main()
