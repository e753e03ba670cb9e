"""`@pytest.mark.cluster(*programs)`: the test makes a cluster of network namespaces; `programs` are needed too.

Where that is not possible the test is skipped, with the reason; with DS_SPARSE_REQUIRE_CLUSTER set, it fails instead.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from benchmarks.cluster import Cluster, ClusterError, missing
from benchmarks.cluster.tools import NETWORK

REQUIRED = os.environ.get("DS_SPARSE_REQUIRE_CLUSTER")  # set in CI, where .ci/run finds that clusters are possible


@functools.cache
def forbidden() -> str | None:
    """Why the system refuses a cluster of one host; None when it does not."""
    try:
        with Cluster(hosts=1):
            return None
    except ClusterError as error:
        return f"the system forbids network namespaces: {error}"


def insist_on(*programs: str) -> None:
    """Ends the test where a cluster with these programs cannot be made."""
    reason = missing(*NETWORK, *programs) or forbidden()
    if reason:
        (pytest.fail if REQUIRED else pytest.skip)(reason)


@pytest.fixture(autouse=True)
def _what_the_test_needs(request: pytest.FixtureRequest) -> None:
    marks = list(request.node.iter_markers("cluster"))
    if marks:
        insist_on(*(program for mark in marks for program in mark.args))


@pytest.fixture
def start_cluster(_what_the_test_needs: None) -> Iterator[Callable[..., Cluster]]:
    """Starts a `Cluster` with the given arguments; it goes down with the test."""
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(Cluster(*args, **options))
