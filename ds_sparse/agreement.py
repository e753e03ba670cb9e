"""Whether all ranks start with the same section and the same model, asked before they first wait for one another.

What a rank starts with is posted in the store of the default process group. A collective would not do: a rank whose
section is off, or whose model has other shapes, takes part in other collectives, and all would hang or crash.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .config import SECTION, CommunicationConfig
from .errors import ConfigError, ExchangeError
from .topology import group_timeout, node_key

_serial = itertools.count()  # of the engines that were built; the same on all ranks, for building one is a collective
MAX_NAMED = 8  # ranks that a message lists
OFF_SECONDS = 10.0  # that a rank whose section is off waits for the others


@dataclass(frozen=True)
class Start:
    """What a rank builds an engine from.

    Attributes:
        config: the section, None when it is absent, switched off or refused.
        refusal: why it is refused, or "".
        model: what each parameter is, by name and in order.
        group: global ranks of this rank's data-parallel group, which all have the same model.
    """

    config: CommunicationConfig | None
    refusal: str
    model: Mapping[str, str]
    group: Sequence[int]

    def summary(self) -> dict[str, Any]:
        return {
            "host": node_key().partition("#")[0], "on": self.config is not None, "refusal": self.refusal,
            "group": min(self.group), **{topic: _digest(items) for topic, items in self.details().items()},
        }  # fmt: skip

    def details(self) -> dict[str, dict[str, str]]:
        """What summaries hold digests of."""
        section = {} if self.config is None else dict(_flat(self.config.model_dump(mode="json"), ""))
        return {"section": section, "model": dict(self.model)}


def describe_model(module: torch.nn.Module) -> dict[str, str]:
    """Name -> shape, dtype and whether it is trained, of each parameter in order."""
    return {
        name: f"{list(getattr(param, 'ds_shape', param.shape))} {param.dtype}{'' if param.requires_grad else ' frozen'}"
        for name, param in module.named_parameters()
    }


class Agreement:
    """Posts what this rank starts with.

    Args:
        timeout: how long to wait for other ranks to post; None for as long as the default process group does.
    """

    def __init__(self, start: Start, timeout: float | None) -> None:
        self._start, self._rank, self._world = start, dist.get_rank(), dist.get_world_size()
        self._is_off = start.config is None and not start.refusal
        wait = timedelta(seconds=OFF_SECONDS) if self._is_off else group_timeout(timeout)
        self._timeout = wait or timedelta(minutes=30)
        self._key, self._store = f"ds_sparse/{next(_serial)}", dist.distributed_c10d._get_default_store()
        self._post("start", start.summary())

    def require(self) -> None:
        """Returns when all ranks have the same section, and the same model within their data-parallel groups.

        Where the section is off, also when the others have not come after `OFF_SECONDS`: such a run may build an
        engine on some ranks only.

        Raises:
            ConfigError: on all ranks, with the ranks that differ, and the first key or parameter in which they do.
            ExchangeError: some ranks did not come to build an engine within the timeout.
        """
        try:
            summaries = self._read("start", range(self._world))
        except ExchangeError:
            if self._is_off:
                return
            raise
        difference = self._difference(summaries)
        if difference:
            self._post("told", True)
            if self._rank == 0:  # the store may end with this process, but others still read it
                self._read("told", [rank for rank, other in enumerate(summaries) if other["on"] or other["refusal"]])
            raise ConfigError(difference)

    def _difference(self, summaries: Sequence[Mapping[str, Any]]) -> str:
        """What to refuse to start for, in the same words on all ranks; "" for nothing."""
        hosts = {rank: note["host"] for rank, note in enumerate(summaries)}
        refused = [rank for rank, note in enumerate(summaries) if note["refusal"]]
        if refused:
            return self._start.refusal or f"on {_who(refused, hosts)}: {summaries[refused[0]]['refusal']}"
        off = [rank for rank, note in enumerate(summaries) if not note["on"]]
        if len(off) == self._world:
            return ""
        if off:
            return _off(off, [rank for rank in hosts if rank not in off], hosts)
        groups: dict[int, list[int]] = {}
        for rank, note in enumerate(summaries):
            groups.setdefault(note["group"], []).append(rank)
        for topic, members in [("section", list(hosts)), *(("model", ranks) for ranks in groups.values())]:
            usual, other = _split({rank: summaries[rank][topic] for rank in members})
            if other:
                self._post(topic, self._start.details()[topic])
                key, values = _first_difference(*self._read(topic, [usual[0], other[0]]))
                said = f"is {values[1]} on {_who(other, hosts)} and {values[0]} on {_who(usual, hosts)}"
                return _EXPLAIN[topic].format(key=key, said=said)
        return ""

    def _name(self, topic: str, rank: int) -> str:
        return f"{self._key}/{topic}/{rank}"

    def _post(self, topic: str, note: Any) -> None:
        self._store.set(self._name(topic, self._rank), json.dumps(note))

    def _read(self, topic: str, ranks: Iterable[int]) -> list[Any]:
        names = {self._name(topic, rank): rank for rank in ranks}
        try:
            self._store.wait(list(names), self._timeout)
        except RuntimeError as error:
            late = [rank for name, rank in names.items() if not self._store.check([name])]
            raise ExchangeError(
                f"{_who(late, {})} did not start to build an engine within {self._timeout.total_seconds():g} s. What "
                f"to do: look for the first error there; if they are only slow, set a longer "
                f"'{SECTION}.topology.timeout_seconds'; see docs/faults.md."
            ) from error
        return [json.loads(note) for note in self._store.multi_get(list(names))]


_EXPLAIN = {
    "section": f"'{SECTION}.{{key}}' {{said}}; allowed is one section for all ranks. What to do: start every node with "
    "the same ds_config.json.",
    "model": f"the parameter '{{key}}' {{said}}; with '{SECTION}' allowed is one model for all data-parallel ranks. "
    "What to do: build the same model everywhere, from the same code and settings.",
}


def _off(off: Sequence[int], on: Sequence[int], hosts: Mapping[int, str]) -> str:
    return (
        f"'{SECTION}' is left out, or its 'enabled' is false, on {_who(off, hosts)}, and it is enabled on "
        f"{_who(on, hosts)}; allowed is one section for all ranks. What to do: start every node with the same "
        f"ds_config.json."
    )


def _split(digests: Mapping[int, str]) -> tuple[list[int], list[int]]:
    """The ranks with the most common digest, and the ranks of the first other one."""
    alike: dict[str, list[int]] = {}
    for rank, digest in digests.items():
        alike.setdefault(digest, []).append(rank)
    usual, *others = sorted(alike.values(), key=lambda ranks: (-len(ranks), ranks[0]))
    return usual, min(others, default=[])


def _first_difference(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, tuple[str, str]]:
    """The first key at which two tables differ, in the order of the first, and what both have there."""
    for key in [*one, *other]:
        if one.get(key) != other.get(key):
            return key, (one.get(key, "missing"), other.get(key, "missing"))
    return "the order of parameters", (", ".join(one), ", ".join(other))


def _who(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    named = ", ".join(f"rank {rank}" + (f" ({hosts[rank]})" if rank in hosts else "") for rank in ranks[:MAX_NAMED])
    return named + (f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else "")


def _flat(value: Any, path: str) -> Iterable[tuple[str, str]]:
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _flat(child, f"{path}.{key}" if path else key)
    else:
        yield path, json.dumps(value)


def _digest(items: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(list(items.items())).encode()).hexdigest()
