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


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` for the nearest of `known`, or an empty string when none is near."""
    matches = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{matches[0]}'?" if matches else ""
