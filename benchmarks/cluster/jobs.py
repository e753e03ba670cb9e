"""Real `deepspeed` jobs on the hosts of a cluster, by two of its launchers.

pdsh      one front end on host 0 reaches every host over ssh; each host runs its own daemon
no_ssh    one front end on every host, as a batch system would start them
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from examples.launch import ROOT, JobError, environment

from . import tools
from .network import Cluster
from .tools import ClusterError, call

LAUNCHERS = {"pdsh": tools.PDSH, "no_ssh": ()}  # launcher -> programs it needs


def launch(
    cluster: Cluster,
    arguments: Sequence[str],
    *,
    ranks_per_host: int = 2,
    launcher: str = "pdsh",
    timeout: float | None = None,
    quiet: bool = False,
) -> str:
    """Runs `deepspeed ARGUMENTS` on all hosts to its end, in the root of this checkout and on their CPUs.

    Args:
        arguments: the script and its arguments; options of the launcher may stand before them.
        timeout: seconds after which the job is stopped.
        quiet: keep what the job prints and return it, instead of passing it on and returning "".

    Raises:
        JobError: the job failed.
        ClusterError: it did not end in time, or what the launcher needs is missing.
    """
    if launcher not in LAUNCHERS:
        raise ClusterError(f"launcher is '{launcher}'; allowed are {', '.join(LAUNCHERS)}")
    tools.require(*LAUNCHERS[launcher])
    with tempfile.TemporaryDirectory(prefix="ds_sparse_cluster_") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        hostfile = folder / "hostfile"
        hostfile.write_text("".join(f"{cluster.hostname(i)} slots={ranks_per_host}\n" for i in range(cluster.hosts)))
        env = environment() | _same_everywhere()
        command = ["deepspeed", "--hostfile", str(hostfile), "--master_addr", cluster.address(0)]
        if launcher == "pdsh":
            env |= stack.enter_context(_ssh(cluster, folder))
            front_ends = [[*command, "--launcher", "pdsh", "--no_ssh_check", *arguments]]
        else:
            nodes = map(str, range(cluster.hosts))
            front_ends = [[*command, "--no_ssh", "--node_rank", node, *arguments] for node in nodes]
        output = stack.enter_context((folder / "output").open("w+")) if quiet else None
        return _run(cluster, front_ends, env, output, timeout)


def _same_everywhere() -> dict[str, str]:
    """What every rank must see alike. DeepSpeed rebuilds its kernels when the folder or the path changes."""
    folder = os.environ.get("TORCH_EXTENSIONS_DIR", str(ROOT / ".cache" / "torch_extensions"))
    # The hosts share the machine's GPUs, if any, and would all use the first ones.
    alike = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return alike | {"TORCH_EXTENSIONS_DIR": folder, "PATH": environment()["PATH"]}


def _run(
    cluster: Cluster, front_ends: list[list[str]], env: dict[str, str], output: IO[str] | None, timeout: float | None
) -> str:
    """Starts the i-th front end on host i and waits for all of them."""
    options: dict[str, Any] = {"cwd": ROOT, "env": env, "stdout": output, "stderr": output}
    deadline = None if timeout is None else time.monotonic() + timeout
    processes = [cluster.start(host, command, **options) for host, command in enumerate(front_ends)]
    try:
        for process in processes:
            process.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        message = f"'{' '.join(front_ends[0])}' was still running after {timeout} s"
        raise ClusterError(f"{message}\n{_text(output)}".rstrip()) from None
    finally:
        for process in processes:
            process.terminate()
    for command, process in zip(front_ends, processes, strict=True):
        if process.returncode:
            raise JobError(command, process.returncode, _text(output))
    return _text(output)


def _text(output: IO[str] | None) -> str:
    if output is None:
        return ""
    output.seek(0)
    return output.read()


@contextlib.contextmanager
def _ssh(cluster: Cluster, folder: Path) -> Iterator[dict[str, str]]:
    """Runs an ssh daemon on every host, with a key made for this job; yields the environment of pdsh's front end.

    The user's own keys and settings are neither read nor written.
    """
    key, daemon, client, variables = (folder / name for name in ("key", "sshd_config", "ssh_config", "environment"))
    call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
    daemon.write_text(
        f"HostKey {key}\nAuthorizedKeysFile {key}.pub\nPermitRootLogin prohibit-password\nStrictModes no\nUsePAM no\n"
        "PidFile none\nLogLevel ERROR\n"
    )
    # The daemons need a moment to listen; a host that is cut off is given up after 6 seconds.
    client.write_text(
        f"IdentityFile {key}\nIdentitiesOnly yes\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\n"
        "LogLevel ERROR\nConnectionAttempts 10\nServerAliveInterval 2\nServerAliveCountMax 3\n"
    )
    variables.write_text("".join(f"{name}={value}\n" for name, value in _same_everywhere().items()))
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd's own; where it runs as a service, that makes it
    command = [tools.path_of("sshd"), "-D", "-e", "-f", str(daemon)]
    daemons = [cluster.start(host, command) for host in range(cluster.hosts)]
    try:
        yield {"PDSH_SSH_ARGS_APPEND": f"-F {client}", "DS_ENV_FILE": str(variables)}
    finally:
        for process in daemons:
            process.terminate()
            process.wait()
