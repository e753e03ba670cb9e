"""A cluster on one machine: hosts are network namespaces, joined by a switch, with links that can be slow or fail.

    with Cluster(hosts=2, rate="200mbit") as cluster:
        results = cluster.run_ranks(2, function)

`python -m benchmarks.cluster --help` is the same as a command.
"""

from .namespaces import names, reap
from .network import Cluster, Counters, interface_counters
from .tools import ClusterError, missing

__all__ = ["Cluster", "ClusterError", "Counters", "interface_counters", "missing", "names", "reap"]
