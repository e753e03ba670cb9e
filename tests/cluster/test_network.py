"""Hosts, links and faults, without training: what the rest of the cluster tests rely on."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.cluster import Cluster, ClusterError, interface_counters, missing, names, reap
from benchmarks.cluster.tools import NETWORK, PDSH
from tests.cluster import conftest

on_a_cluster = pytest.mark.cluster
StartCluster = Callable[..., Cluster]


def output(cluster: Cluster, host: int, *command: str) -> str:
    process = cluster.start(host, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return process.communicate(timeout=30)[0].strip()


def python(cluster: Cluster, host: int, code: str) -> str:
    return output(cluster, host, sys.executable, "-S", "-c", code)


# ---- hosts --------------------------------------------------------------------------------------------------------


@on_a_cluster
def test_a_host_has_its_own_name_addresses_and_processes(start_cluster: StartCluster) -> None:
    cluster = start_cluster(hosts=3)
    ask = "import os, socket; print(socket.gethostname(), socket.gethostbyname('host2'), "
    ask += "sorted(os.listdir('/sys/class/net')))"
    assert python(cluster, 1, ask) == "host1 10.77.0.13 ['eth0', 'lo']"
    assert output(cluster, 1, "pwd") == os.getcwd()
    processes = python(cluster, 1, "import os; print(*sorted(int(n) for n in os.listdir('/proc') if n.isdigit()))")
    assert processes.startswith("1 ") and str(os.getpid()) not in processes.split()
    Path("/dev/shm/of_the_machine").touch()
    assert output(cluster, 1, "ls", "/dev/shm") == ""
    os.unlink("/dev/shm/of_the_machine")
    assert socket.gethostname() != "host1"


@on_a_cluster
def test_what_a_job_leaves_is_collected_by_the_hosts_first_process(start_cluster: StartCluster) -> None:
    cluster = start_cluster(hosts=1)
    python(cluster, 0, "import os\nif not os.fork(): os.setsid(); os.fork(); os._exit(0)")
    states = "import glob; print([open(f).read().split()[2] for f in glob.glob('/proc/[0-9]*/stat')].count('Z'))"
    deadline = time.monotonic() + 10
    while python(cluster, 0, states) != "0":
        assert time.monotonic() < deadline


@on_a_cluster
def test_everything_is_gone_afterwards() -> None:
    with Cluster(hosts=2) as cluster:
        sleeper = cluster.start(1, ["sleep", "1000"])
        assert cluster.name in names()
        assert python(cluster, 1, "print(1)") == "1"
    assert sleeper.wait(timeout=10) != 0
    assert cluster.name not in names()
    with pytest.raises(ClusterError, match=f"no cluster '{cluster.name}' is up; there are: "):
        Cluster.attach(cluster.name)


@on_a_cluster
def test_an_error_takes_the_cluster_down_too() -> None:
    cluster = Cluster(hosts=1)
    with pytest.raises(KeyError), cluster:
        raise KeyError
    assert cluster.name not in names()
    broken = Cluster(hosts=1, rate="fast")
    with pytest.raises(ClusterError, match="tc .* rate fast .*failed: .*rate"):
        broken.up()
    assert broken.name not in names()


@on_a_cluster
def test_a_killed_run_is_cleared_away_and_a_living_one_is_not(start_cluster: StartCluster) -> None:
    alive = start_cluster(hosts=1)
    code = (
        "import os; from benchmarks.cluster import Cluster, names; cluster = Cluster(hosts=1).up()\n"
        "sleeper = cluster.start(0, ['sleep', '1000'], stdout=-3)\n"
        "print(cluster.name, sleeper.pid, cluster.name in names(), flush=True); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    name, sleeper, was_up = killed.stdout.split()
    assert was_up == "True"
    reap()
    assert name not in names() and alive.name in names()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{sleeper}").exists():
        assert time.monotonic() < deadline


@on_a_cluster
def test_two_clusters_do_not_meet(start_cluster: StartCluster) -> None:
    first, second = start_cluster(hosts=2), start_cluster(hosts=2)
    first.cut(1)
    assert not reaches(first) and reaches(second)
    assert len({first.name, second.name} & set(names())) == 2


@on_a_cluster
def test_a_named_cluster_is_found_again(start_cluster: StartCluster) -> None:
    name = f"test-{os.getpid()}"
    cluster = start_cluster(hosts=2, name=name)
    again = Cluster.attach(name)
    assert again.hosts == 2 and output(again, 1, "hostname") == "host1"
    with pytest.raises(ClusterError, match=f"a cluster '{name}' is up already"):
        Cluster(hosts=2, name=name).up()
    assert reaches(cluster)


# ---- links --------------------------------------------------------------------------------------------------------


def reaches(cluster: Cluster) -> bool:
    """Whether host 0 gets an answer from host 1: a refusal, as nobody listens there. Half a second is 1000 RTT."""
    code = "import socket; socket.setdefaulttimeout(0.5); print(socket.socket().connect_ex(('host1', 9)))"
    return python(cluster, 0, code) == str(errno.ECONNREFUSED)


def send(cluster: Cluster, datagrams: int) -> None:
    """From host 0 to host 1, 1000 bytes each."""
    code = "import socket; to = socket.gethostbyname('host1'), 9; out = socket.socket(type=socket.SOCK_DGRAM)\n"
    python(cluster, 0, code + f"for _ in range({datagrams}): out.sendto(bytes(1000), to)")


@on_a_cluster
def test_a_cut_link_carries_nothing_until_it_is_healed(start_cluster: StartCluster) -> None:
    cluster = start_cluster(hosts=2)
    for host in (0, 1):
        assert reaches(cluster)
        cluster.cut(host)
        assert not reaches(cluster)
        cluster.heal(host)
    assert reaches(cluster)


@on_a_cluster("nft")
def test_loss_drops_the_share_that_was_asked_for(start_cluster: StartCluster) -> None:
    cluster = start_cluster(hosts=2)
    assert reaches(cluster)  # and the addresses are resolved before frames get lost
    for percent in (25, 100, 0):
        cluster.loss(1, percent)
        sent, received = cluster.counters(0), cluster.counters(1)
        send(cluster, 4000)
        sent, received = cluster.counters(0).since(sent), cluster.counters(1).since(received)
        # 5 standard deviations of 4000 draws at 25 % are 3.4 percentage points; 0 and 100 % are exact, but for the
        # few frames of other protocols.
        assert sent.sent > 4_000_000
        assert received.received / sent.sent == pytest.approx(1 - percent / 100, abs=0.035)


@on_a_cluster
def test_counters_are_those_of_one_host(start_cluster: StartCluster) -> None:
    cluster = start_cluster(hosts=3)
    before = [cluster.counters(host) for host in range(3)]
    send(cluster, 100)
    added = [cluster.counters(host).since(before[host]) for host in range(3)]
    # 100 datagrams of 1000 bytes with 42 bytes of headers, and some frames of ARP and IPv6.
    assert 104_200 <= added[0].sent <= 106_000 and 104_200 <= added[1].received <= 106_000
    assert added[2].sent < 1000 and added[2].received < 2000
    with pytest.raises(ClusterError, match="this process is in no host of a cluster"):
        interface_counters("eth77")


# ---- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hosts": 0}, "hosts is 0; allowed is 1 to 200"),
        ({"hosts": 201}, "hosts is 201; allowed is 1 to 200"),
        ({"name": "7 up"}, "name is '7 up'; allowed are letters, digits, '-' and '_', a letter first"),
    ],
)
def test_a_wrong_argument_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Cluster(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda cluster: cluster.cut(2), "host is 2; this cluster has 0 to 1"),
        (lambda cluster: cluster.heal(-1), "host is -1; this cluster has 0 to 1"),
        (lambda cluster: cluster.counters(2), "host is 2; this cluster has 0 to 1"),
        (lambda cluster: cluster.loss(0, 101), "loss is 101 percent; allowed is 0 to 100"),
    ],
)
def test_a_host_or_share_that_does_not_exist_is_refused(act: Callable[[Cluster], object], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        act(Cluster(hosts=2))


def test_what_is_missing_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda program, path: None if program in ("tc", "ssh", "sshd") else program)
    assert missing("mount") is None
    assert missing(*NETWORK, *PDSH) == (
        "tc, ssh, sshd not found: apt-get install --no-install-recommends iproute2 openssh-client openssh-server"
    )


def test_only_root_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="only root may create network namespaces: run this as root"):
        Cluster().up()


@pytest.mark.parametrize(
    ("required", "outcome"), [(None, pytest.skip.Exception), ("1", pytest.fail.Exception)], ids=["skips", "fails"]
)
def test_a_test_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch, required: str | None, outcome: type) -> None:
    monkeypatch.setattr(conftest, "REQUIRED", required)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda program, path: None if program == "pdsh" else program)
    with pytest.raises(outcome, match="pdsh not found: apt-get install --no-install-recommends pdsh"):
        conftest.insist_on(*PDSH)
    monkeypatch.setattr(shutil, "which", lambda program, path: program)
    monkeypatch.setattr(conftest, "forbidden", lambda: "the system forbids network namespaces: not permitted")
    with pytest.raises(outcome, match="not permitted"):
        conftest.insist_on()
