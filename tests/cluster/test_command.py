"""`python -m benchmarks.cluster`: what it prints, changes and refuses. Its `run` is in test_launchers.py."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from benchmarks.cluster import names
from benchmarks.cluster.__main__ import main
from tests.cluster.test_network import reaches

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def command(_what_the_test_needs: None) -> Callable[..., int]:
    """Runs a command on a cluster of this test's own; returns the exit status."""
    name = f"test-{os.getpid()}"

    def run(*words: str) -> int:
        cut = words.index("--") if "--" in words else len(words)
        return main([*words[:cut], "--name", name, *words[cut:]])

    yield run
    if name in names():
        run("down")


@pytest.mark.cluster("nft")
def test_a_cluster_by_hand(command: Callable[..., int], capfd: Capture) -> None:
    from benchmarks.cluster import Cluster

    assert command("up", "--hosts", "2", "--rate", "1gbit") == 0
    assert capfd.readouterr().out == "host0  10.77.0.11\nhost1  10.77.0.12\n"
    cluster = Cluster.attach(f"test-{os.getpid()}")
    for spoil, mend in ((["cut", "1"], ["heal", "1"]), (["loss", "1", "100"], ["loss", "1", "0"])):
        assert command(*spoil) == 0 and not reaches(cluster)
        assert command(*mend) == 0 and reaches(cluster)
    assert command("exec", "1", "--", "sh", "-c", "hostname; exit 7") == 7
    assert capfd.readouterr().out == "host1\n"
    assert command("stat") == 0
    header, first, second = capfd.readouterr().out.splitlines()
    assert header.split() == ["host", "bytes", "sent", "bytes", "received"]
    assert first.startswith("host0") and second.startswith("host1")
    assert command("down") == 0
    assert f"test-{os.getpid()}" in capfd.readouterr().out
    assert f"test-{os.getpid()}" not in names()
    assert command("down") == 1
    assert f"no cluster 'test-{os.getpid()}' is up; there are: " in capfd.readouterr().err


@pytest.mark.cluster
def test_shape_changes_the_rate_of_both_directions(command: Callable[..., int], capfd: Capture) -> None:
    assert command("up") == 0
    show = ["exec", "0", "--", "tc", "qdisc", "show", "dev", "eth0"]
    for rate, shown in (("200mbit", "rate 200Mbit"), ("50mbit", "rate 50Mbit"), ("off", "noqueue")):
        assert command("shape", rate) == 0
        capfd.readouterr()
        assert command(*show) == 0
        assert shown in capfd.readouterr().out
    assert command("shape", "fast") == 1
    assert '"fast"' in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "'run' needs '--' and what to run"),
        (["exec", "0", "--"], "'exec' needs '--' and what to run"),
        (["cut", "1", "--", "x"], "'cut' takes no '--'"),
        (["fly"], "invalid choice: 'fly'"),
        (["cut", "one"], "invalid int value: 'one'"),
    ],
)
def test_a_wrong_command_line_is_refused(words: list[str], message: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_who_is_not_root_is_told_so(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for words in (["up"], ["stat"], ["run", "--", "train.py"], ["down"]):
        assert main(words) == 1
        assert "only root may create network namespaces" in capsys.readouterr().err
