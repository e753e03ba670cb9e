"""The exceptions of the package, and the suggestion that goes with a misspelt word."""

from __future__ import annotations

import pytest

import ds_sparse
from ds_sparse.errors import did_you_mean


def test_a_configuration_error_is_caught_as_a_value_error() -> None:
    with pytest.raises(ValueError, match="density"):
        raise ds_sparse.ConfigError("density")


@pytest.mark.parametrize("error", [ds_sparse.InactiveError, ds_sparse.WireError])
def test_what_happens_in_a_run_is_no_configuration_error(error: type[Exception]) -> None:
    assert issubclass(error, RuntimeError)
    assert not issubclass(error, ValueError)
    assert error.__name__ in ds_sparse.__all__


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
