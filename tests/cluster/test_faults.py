"""A rank dies, a link is cut: who sees what, when; and what it takes to go on."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.cluster import Cluster
from benchmarks.faults import CUT_SECONDS, FAULTY, LONG, SAVED, SHORT, STEPS, VICTIM, Outcome, Seen, resume, run_fault

pytestmark = pytest.mark.cluster
StartCluster = Callable[..., Cluster]
Histories = list[list[torch.Tensor]]
# A busy machine lets a process wait for the CPU; much more than this would be a hang.
SLACK = 10.0


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[Histories]:
    """The parameters of every rank after every step of a job without a fault."""
    with tempfile.TemporaryDirectory() as folder, Cluster(hosts=2) as cluster:
        outcome = run_fault(cluster, "none", folder)
        assert [seen.error for seen in outcome.seen if seen] == [""] * 4
        yield outcome.histories


def run(start_cluster: StartCluster, fault: str, folder: Path) -> tuple[Cluster, Outcome]:
    cluster = start_cluster(hosts=2)
    return cluster, run_fault(cluster, fault, str(folder))


def assert_resumes(cluster: Cluster, folder: Path, undisturbed: Histories) -> None:
    """A new job from the last checkpoint is bitwise the job without a fault."""
    for resumed, expected in zip(resume(cluster, str(folder)), undisturbed, strict=True):
        assert len(resumed) == STEPS - SAVED
        assert all(torch.equal(a, b) for a, b in zip(resumed, expected[SAVED:], strict=True))


def assert_names(seen: Seen | None, peers: str) -> None:
    assert seen is not None and seen.error == "ExchangeError"
    start = rf"method 'sparse_gradient' at step {FAULTY + 1} got no answer from {peers} after \d+\.\d s: \[.*gloo"
    assert re.match(start, seen.message), seen.message
    assert "What to do: " in seen.message and "docs/faults.md" in seen.message


def test_a_killed_rank_ends_all_others_at_once_and_a_new_job_goes_on_bitwise(
    start_cluster: StartCluster, tmp_path: Path, undisturbed: Histories
) -> None:
    cluster, outcome = run(start_cluster, "kill", tmp_path)
    assert outcome.seen[VICTIM] is None
    # Its peer misses it at level 2, its mate at level 1, and the fourth rank misses whichever of the two gave up.
    assert_names(outcome.seen[0], r"rank 2 on node 1 \(host1\)")
    assert_names(outcome.seen[3], r"rank 2 on node 1 \(host1\) in level 1")
    assert_names(outcome.seen[1], r"rank [03] on node . \(host.\)( in level 1)?")
    assert all(seen.seconds < SLACK < LONG for seen in outcome.seen if seen)
    assert_resumes(cluster, tmp_path, undisturbed)


def test_a_link_cut_for_good_ends_all_ranks_after_the_timeout_and_a_new_job_goes_on_bitwise(
    start_cluster: StartCluster, tmp_path: Path, undisturbed: Histories
) -> None:
    cluster, outcome = run(start_cluster, "cut", tmp_path)
    for rank, seen in enumerate(outcome.seen):
        peer = (rank + 2) % 4
        assert_names(seen, rf"rank {peer} on node {peer // 2} \(host{peer // 2}\)")
        assert seen is not None and SHORT - 1 < seen.seconds < SHORT + SLACK  # others may have come to the step earlier
    assert_resumes(cluster, tmp_path, undisturbed)


def test_a_job_outlives_a_short_cut_and_loses_nothing(
    start_cluster: StartCluster, tmp_path: Path, undisturbed: Histories
) -> None:
    _, outcome = run(start_cluster, "cut and heal", tmp_path)
    for seen in outcome.seen:
        assert seen is not None and not seen.error
        assert CUT_SECONDS - 1 < seen.seconds < LONG
    for history, expected in zip(outcome.histories, undisturbed, strict=True):
        assert len(history) == STEPS
        assert all(torch.equal(a, b) for a, b in zip(history, expected, strict=True))
