"""Random sections that parse really train, or are refused with a ConfigError; nothing else may come out.

DS_SPARSE_FUZZ_RUNS=3000 for more of them, DS_SPARSE_FUZZ_SEED for others.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from typing import Any

import torch

import ds_sparse
from ds_sparse.config import parse
from tests.engines import build_config, build_engine, train
from tests.ranks import run_ranks
from tests.sections import section

RUNS = int(os.environ.get("DS_SPARSE_FUZZ_RUNS", "30"))
SEED = int(os.environ.get("DS_SPARSE_FUZZ_SEED", "0"))


def sound_sections() -> Iterator[tuple[int, dict[str, Any]]]:
    """With the seed of each. The world is two ranks, so two nodes; and nobody waits only a second for the other."""
    for seed in itertools.count(SEED):
        made = section(random.Random(seed), spoil=0.0)
        made["topology"] = {"ranks_per_node": 1}
        made["exclude"] = {"min_numel": 20} | made.get("exclude", {})  # the default covers the whole model
        for key in ("enabled", "sharded_update"):  # mostly off, mostly refused
            made.pop(key, None)
        try:
            parse(made)
        except ds_sparse.ConfigError:
            continue
        yield seed, made


def _train(seed: int, made: dict[str, Any]) -> torch.Tensor | str:
    """The parameters after two steps, or the refusal."""
    rng = random.Random(seed)
    optimizers = ["AdamW"] if parse(made).method == "sparse_momentum" else ["SGD0", "SGD0", "SGD"]
    config = build_config(
        stage=rng.choice([0, 1, 2]), optimizer=rng.choice(optimizers), accumulation=rng.choice([1, 2]),
        clipping=rng.choice([0.0, 0.1]), section=made,
    )  # fmt: skip
    try:
        return train(build_engine(config), 2)[-1]
    except ds_sparse.ConfigError as error:
        return str(error)
    except Exception as error:
        raise AssertionError(f"seed {seed}, {made}: {type(error).__name__}") from error


def _train_all() -> list[torch.Tensor | str]:
    return [_train(seed, made) for seed, made in itertools.islice(sound_sections(), RUNS)]


def test_sections_that_parse_train_or_are_refused() -> None:
    trained = 0
    for one, other in zip(*run_ranks(2, _train_all, timeout=60 + RUNS), strict=True):
        assert type(one) is type(other)
        if isinstance(one, str):
            assert one == other
        else:
            assert torch.isfinite(one).all() and torch.equal(one, other)
            trained += 1
    assert trained > RUNS / 3  # the control: most are no refusals
