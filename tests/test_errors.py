"""The exceptions of the package, and the suggestion that goes with a misspelt word."""

from __future__ import annotations

import pytest

import ds_sparse
from ds_sparse.errors import did_you_mean


def test_a_configuration_error_is_caught_as_a_value_error() -> None:
    with pytest.raises(ValueError, match="density"):
        raise ds_sparse.ConfigError("density")


def test_an_inactive_run_is_no_configuration_error() -> None:
    assert issubclass(ds_sparse.InactiveError, RuntimeError)
    assert not issubclass(ds_sparse.InactiveError, ValueError)


@pytest.mark.parametrize(
    "word, known, suggested",
    [
        ("densitty", ["density", "seed"], "density"),
        ("dense-steps", ["densities", "dense_steps", "steps_per_density"], "dense_steps"),
        ("mstop", ("topk", "mstopk"), "mstopk"),
        ("density", iter(["seed", "density"]), "density"),  # any iterable, once through
    ],
)
def test_the_nearest_known_word_is_suggested(word: str, known: object, suggested: str) -> None:
    assert did_you_mean(word, known) == f" Did you mean '{suggested}'?"  # type: ignore[arg-type]


@pytest.mark.parametrize("known", [[], ["enabled", "method"]])
def test_nothing_is_suggested_when_no_known_word_is_near(known: list[str]) -> None:
    assert did_you_mean("learning_rate", known) == ""
