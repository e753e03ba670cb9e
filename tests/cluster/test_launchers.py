"""Jobs as users start them on several machines: through `deepspeed`, to every host of a cluster."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.cluster import Cluster, ClusterError
from benchmarks.cluster.jobs import LAUNCHERS, JobError, launch
from benchmarks.cluster.tools import PDSH
from examples.launch import ROOT
from tests.cluster.test_network import python
from tests.cluster.training import check

StartCluster = Callable[..., Cluster]
JOB = ["--module", "tests.cluster.job", "--result"]
SECONDS = 500  # 15 to 30 on an idle machine


def check_result(path: Path, output: str) -> None:
    assert "2 nodes x 2 ranks, sparse_gradient" in output  # found by itself: the section names no topology
    ranks = json.loads(path.read_text())
    assert len(ranks) == 4
    assert all(rank["dense_over_wire"] > 5 for rank in ranks)
    check(ranks, hosts=2)


@pytest.mark.launcher
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.cluster(*PDSH)
def test_a_job_over_ssh_and_pdsh_compresses_what_it_says(start_cluster: StartCluster, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    output = launch(start_cluster(hosts=2), [*JOB, str(result)], launcher="pdsh", timeout=SECONDS, quiet=True)
    assert "host0: " in output and "host1: " in output  # as pdsh marks its lines
    check_result(result, output)


@pytest.mark.launcher
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.cluster
def test_the_command_runs_a_job_without_ssh(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.cluster", "run", "--rate", "1gbit", "--launcher", "no_ssh", "--"]
    done = subprocess.run(
        [*command, *JOB, str(result)], cwd=ROOT, check=False, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check_result(result, done.stdout + done.stderr)
    summary, header, *hosts = done.stdout.splitlines()[-4:]
    assert summary.endswith("s, links: 1gbit") and header.split() == ["host", "bytes", "sent", "bytes", "received"]
    reported = sum(rank["reported"] for rank in json.loads(result.read_text())[:2])
    for index, line in enumerate(hosts):
        name, sent, received = line.replace(",", "").split()
        assert name == f"host{index}" and min(int(sent), int(received)) > reported


@pytest.mark.cluster
def test_a_failing_job_is_an_error_with_its_output(start_cluster: StartCluster) -> None:
    cluster = start_cluster(hosts=1)
    with pytest.raises(JobError, match="tests/cluster/no_such_script.py") as caught:
        launch(cluster, ["tests/cluster/no_such_script.py"], launcher="no_ssh", timeout=SECONDS, quiet=True)
    assert caught.value.status != 0 and "No such file or directory" in caught.value.output


@pytest.mark.cluster
def test_a_job_that_does_not_end_is_stopped(start_cluster: StartCluster) -> None:
    cluster = start_cluster(hosts=1)
    with pytest.raises(ClusterError, match="'deepspeed .*' was still running after 0.5 s"):
        launch(cluster, ["examples/train_lm.py"], launcher="no_ssh", timeout=0.5, quiet=True)
    count = "import os; print(sum(name.isdigit() for name in os.listdir('/proc')))"
    deadline = time.monotonic() + 30
    while python(cluster, 0, count) != "2":  # the host's first process, and the one that counts
        assert time.monotonic() < deadline


def test_an_unknown_launcher_is_refused() -> None:
    assert set(LAUNCHERS) == {"pdsh", "no_ssh"}
    with pytest.raises(ClusterError, match="launcher is 'mpi'; allowed are pdsh, no_ssh"):
        launch(Cluster(), ["train.py"], launcher="mpi")
