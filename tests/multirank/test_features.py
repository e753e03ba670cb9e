"""The table of docs/features.md, row by row: one stage and precision of each here, all of them in `make matrix`."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

from ds_sparse.links import Link
from tests.multirank import matrix
from tests.multirank.features import COLUMNS, DTYPES, FEATURES
from tests.multirank.matrix import Verdict

Cell = tuple[int, str, str]


def _one_cell_of_each_row() -> list[Cell]:
    """Columns and precisions take turns, so that all of them occur."""
    cells, turn = [], itertools.count()
    for index, feature in enumerate(FEATURES):
        if feature.compiled:  # in `make matrix` only
            continue
        meant = list(itertools.product(feature.columns, feature.dtypes))
        meant = [pair for pair in meant if pair != ("0", "fp16")] or meant
        cells.append((index, *meant[7 * next(turn) % len(meant)]))
    return cells


CELLS = _one_cell_of_each_row()


@functools.cache
def _together() -> dict[Cell, Verdict]:
    """What leaves nothing behind is tried by one set of ranks, which is what makes it affordable."""
    cells = [cell for cell in CELLS if not FEATURES[cell[0]].alone]
    return dict(zip(cells, matrix.verdicts(cells), strict=True))


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join([FEATURES[cell[0]].name, *cell[1:]]))
def test_it_is_as_the_document_says(cell: Cell):
    index, column, dtype = cell
    verdict = matrix.verdicts([cell])[0] if FEATURES[index].alone else _together()[cell]
    assert matrix.as_said(verdict) == matrix.read()[FEATURES[index].name, column, dtype]


def test_the_document_has_all_rows_and_says_something_in_every_cell():
    expected = {(feature.name, column, dtype) for feature in FEATURES for column in COLUMNS for dtype in DTYPES}
    assert matrix.read().keys() == expected
    assert all(said == "works" or said == "does not apply" or len(said) > 20 for said in matrix.read().values())


def test_all_stages_and_precisions_occur():
    assert {column for _, column, _ in CELLS} == set(COLUMNS)
    assert {dtype for _, _, dtype in CELLS} == set(DTYPES)


def _broken(way: str) -> Any:
    if way == "silent":
        speak = Link.sum_
        Link.sum_ = lambda link, tensor: tensor if link._kind == "inter" and tensor.numel() > 1 else speak(link, tensor)
    if way == "lossy":
        from ds_sparse.feedback import ErrorFeedback

        take = ErrorFeedback.take_

        def forgetful(self: Any, *args: Any) -> Any:
            payload = take(self, *args)
            self.residual.mul_(0.5)
            return payload

        ErrorFeedback.take_ = forgetful
    from tests.multirank.feature_cells import train_cells

    return train_cells([(0, "1", "fp32")])


@pytest.mark.parametrize(
    ("way", "problem"),
    [("", ""), ("silent", "differ (dense); dense is"), ("lossy", "do not add up (sparse)")],
    ids=["as it is", "nothing crosses nodes", "residual is lost"],
)
def test_a_cell_fails_when_it_should(way: str, problem: str):
    ranks = matrix.run_ranks(matrix.RANKS, _broken, way)
    verdict = matrix.judge(FEATURES[0], "fp32", [rank[0] for rank in ranks])
    assert verdict.kind == ("FAIL" if problem else "works"), verdict
    assert problem in verdict.why


def test_a_step_in_the_wrong_type_would_be_seen():
    """The control of the tolerances: a learning rate that is a tenth off is outside of all of them."""
    stock, dense = matrix.Run(), matrix.Run()
    stock.params, dense.params = ([torch.zeros(3), torch.ones(3) * factor] for factor in (1.0, 0.9))
    stock.norms = dense.norms = [1.0]
    for tolerance in matrix.TOLERANCE.values():
        assert list(matrix._against_stock(stock, dense, tolerance))
