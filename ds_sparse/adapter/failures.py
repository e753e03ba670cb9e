"""Names what was under way when other ranks are gone while DeepSpeed itself communicates."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..level2 import Level2
from ..links import Link, waiting_for


def name_failures(engine: Any, level2: Level2, node: Link) -> None:
    """Has `engine.backward` and `engine.step` raise an `ExchangeError` for failures of level 1 too.

    Level 1, which is ZeRO's or ours, communicates inside the node. A rank that dies is noticed there by the ranks of
    its node, and by those of other nodes whose mates gave up.
    """

    def others() -> str:
        return f"{node.others() or 'other ranks'} in level 1"

    def named(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            with level2.naming_failures(), waiting_for(others):
                return original(*args, **kwargs)

        return call

    engine.backward, engine.step = named(engine.backward), named(engine.step)
