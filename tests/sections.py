"""Random `compressed_communication` sections, made from the models of the configuration: sound ones and spoilt ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from ds_sparse.config import CommunicationConfig

EXTREMES: list[Any] = [
    0, -1, 1, 2, 63, 2**31, 2**63, -(2**63), 10**400, 0.0, -0.0, 1e-320, 1e-9, 0.5, 1.0, 1e308, -1e308,
    float("inf"), float("-inf"), float("nan"),
]  # fmt: skip
WORDS = ["", "auto", "topk", "dense", "true", "\x00", "\ud800", "ä" * 50, "compressor.density", "null", "x" * 10_000]
PATTERNS = ["(", "[a-", "*", "a{99999999999999999999}", "(?P<a>a)(?P=b)", "(?i", "\\", "(" * 500 + ")" * 500, "(?<=a+)"]
ODD: list[Callable[[random.Random], Any]] = [
    lambda rng: None, lambda rng: True, lambda rng: False, lambda rng: [], lambda rng: {},
    lambda rng: rng.choice(EXTREMES), lambda rng: rng.choice(WORDS), lambda rng: rng.choice(PATTERNS),
    lambda rng: [rng.choice(EXTREMES) for _ in range(rng.randrange(4))],
    lambda rng: {rng.choice(WORDS): rng.choice(EXTREMES)},
    lambda rng: deep(rng, rng.choice([2, 30, 2000])),
    lambda rng: [rng.choice(WORDS + PATTERNS)],
]  # fmt: skip


def deep(rng: random.Random, depth: int) -> Any:
    """Lists and objects within one another."""
    value: Any = rng.choice(EXTREMES + WORDS)
    for _ in range(depth):
        value = [value] if rng.random() < 0.5 else {rng.choice(["density", "a", ""]): value}
    return value


def section(rng: random.Random, spoil: float) -> Any:
    """A section in which about the share `spoil` of blocks and values is replaced, added or misspelt."""
    return _block(rng, CommunicationConfig, spoil)


def _block(rng: random.Random, model: type[BaseModel], spoil: float) -> Any:
    if rng.random() < spoil / 4:
        return rng.choice(ODD)(rng)
    made: dict[Any, Any] = {}
    for name, field in model.model_fields.items():
        if rng.random() < 0.5:
            key = name if rng.random() >= spoil / 4 else name[: rng.randrange(len(name))] + rng.choice(["", "x", "-"])
            made[key] = _value(rng, field.annotation, field.metadata, spoil)
    if rng.random() < spoil / 4:
        made[rng.choice([*WORDS, 3, None])] = rng.choice(ODD)(rng)
    return made


def _value(rng: random.Random, annotation: Any, metadata: Any, spoil: float) -> Any:
    if rng.random() < spoil:
        return rng.choice(ODD)(rng)
    if get_origin(annotation) is Annotated:
        inner, *extra = get_args(annotation)
        return _value(rng, inner, [*extra, *metadata], spoil)
    if get_origin(annotation) is Literal:
        return rng.choice(get_args(annotation))
    if get_origin(annotation) is tuple:
        return [_value(rng, get_args(annotation)[0], [], spoil) for _ in range(rng.randrange(3))]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _block(rng, annotation, spoil)
    arms = [arm for arm in get_args(annotation) if arm is not type(None)]
    if arms:
        return _value(rng, rng.choice(arms), metadata, spoil)
    if annotation is bool:
        return rng.random() < 0.5
    if annotation is str:
        return rng.choice(["bias", r"^4\.", "norm|embed", "", ".*weight$"])
    return _number(rng, annotation is int, metadata)


def _number(rng: random.Random, whole: bool, metadata: Any) -> float:
    """Within the bounds, now and then right on them."""
    low, high = (_bound(metadata, "ge", "gt", 0), _bound(metadata, "le", "lt", 8))
    if whole:
        return rng.choice([int(low), min(int(low) + 1, int(high)), rng.randint(int(low), int(min(high, low + 8)))])
    return rng.choice([low, high, low + (high - low) * rng.random(), low + (high - low) * 0.05])


def _bound(metadata: Any, *keys_and_default: Any) -> float:
    *keys, default = keys_and_default
    for item in metadata:
        for source in (item, *getattr(item, "metadata", ())):
            for key in keys:
                bound = getattr(source, key, PydanticUndefined)
                if isinstance(bound, int | float):
                    return bound
    return default
