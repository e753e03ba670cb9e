"""The exceptions a user of ds_sparse can meet."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class ConfigError(ValueError):
    """The configuration cannot be run as written. Raised before the first training step.

    The message names the key as the user wrote it, the value received, what is allowed and what to do.
    """


class InactiveError(RuntimeError):
    """Compressed communication is switched on but did not take part in a training step."""


class SlowerThanDenseError(RuntimeError):
    """Compressed communication was measured to be slower than dense, and `fallback` is "error"."""


class WireError(RuntimeError):
    """A peer's message is not what it should be: truncated, damaged, or of another step or configuration.

    The message names the node, the step and what was found.
    """


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read, on some rank; no rank goes on.

    The message names the checkpoint, the rank, the cause and what to do.
    """


class ExchangeError(RuntimeError):
    """Other ranks did not answer: they died, or their link is cut, or they are slower than the timeout.

    The message names the method, the step and the ranks waited for; the cause is what gloo or NCCL raised.
    """


class DriftError(RuntimeError):
    """Parameters are not the same on all nodes any more. Raised on all ranks.

    The message names the step, the first parameter that differs and the nodes.
    """


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` for the nearest of `known`, or an empty string when none is near."""
    matches = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{matches[0]}'?" if matches else ""
