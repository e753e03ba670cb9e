"""Speeds: what the links and the devices of a cluster do, measured by a probe or given by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..config import LinkSettings
from ..costs import GUESS, Constants


class ProbeError(ValueError):
    """A file is not what `ds_sparse probe` writes, or was measured where there was nothing to measure."""


@dataclass(frozen=True)
class Speeds:
    """Of a cluster whose nodes are all alike.

    Attributes:
        link: from a node to the others; its ranks share it.
        node: of each rank to those of its node; None: taken as free.
        given: the constants of the cost model.
        adam: seconds an element of an Adam step; None: left out.
    """

    link: LinkSettings
    node: LinkSettings | None = None
    given: Constants = GUESS
    adam: float | None = None

    @classmethod
    def from_probe(cls, path: Path) -> Speeds:
        """Out of a file that `ds_sparse probe` wrote.

        Raises:
            ProbeError: names the file and what is wrong with it.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ProbeError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ProbeError(f"{path} is not valid JSON: {error}") from error
        try:
            return cls._read(found, path)
        except (KeyError, TypeError, ValidationError) as error:
            raise ProbeError(
                f"{path} is not what 'ds_sparse probe' writes: {error!r}. What to do: run the probe again."
            ) from error

    @classmethod
    def _read(cls, found: dict[str, Any], path: Path) -> Speeds:
        if found["inter_node"] is None:
            raise ProbeError(
                f"{path} was measured on one node, so that nothing is known of the link between nodes. What to do: run "
                f"the probe on two nodes at least, or give --gbit-per-second."
            )
        given = Constants(
            select=1e-9 * found["select_ns_per_element"],
            encode=1e-9 * found["encode_ns_per_entry"],
            sum=1e-9 * found["sum_ns_per_entry"],
            gather=found["all_gather_over_all_reduce"],
            deal=found["all_to_all_over_all_reduce"],
        )
        node = found["intra_node"] and LinkSettings(**found["intra_node"])
        return cls(LinkSettings(**found["inter_node"]), node, given, 1e-9 * found["adam_ns_per_element"])
