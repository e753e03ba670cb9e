"""Whatever stands in the section: it parses, or it is a ConfigError that names a key. Nothing else may come out.

10 000 random sections; DS_SPARSE_FUZZ=1000000 for more, DS_SPARSE_FUZZ_SEED for others.
"""

from __future__ import annotations

import os
import random

import pytest

from ds_sparse import ConfigError
from ds_sparse.config import CommunicationConfig, parse
from tests.sections import section

NUMBER = int(os.environ.get("DS_SPARSE_FUZZ", "10000"))
SEED = int(os.environ.get("DS_SPARSE_FUZZ_SEED", "0"))


def outcome(seed: int, spoil: float) -> str:
    """"parsed" or "refused"."""
    made = section(random.Random(seed), spoil)
    try:
        parsed = parse(made)
    except ConfigError as error:
        said = str(error)
        assert said.startswith("'compressed_communication"), said
        assert len(said) < 2000  # for a person to read
        return "refused"
    assert isinstance(parsed, CommunicationConfig)
    assert parse(made) == parsed
    return "parsed"


@pytest.mark.parametrize("spoil", [0.0, 0.03, 0.3])
def test_any_section_parses_or_is_refused_with_its_key(spoil: float) -> None:
    counts = {"parsed": 0, "refused": 0}
    for i in range(NUMBER // 3):
        seed = SEED + i
        try:
            counts[outcome(seed, spoil)] += 1
        except Exception as error:
            said = f"{type(error).__name__}: {str(error)[:300]}"
            raise AssertionError(f"section({seed}, {spoil}) gives {said}") from error
    # The control: both happen, or the sections would be too sound or too spoilt to find anything.
    assert min(counts.values()) > NUMBER // 3 // 200, counts
