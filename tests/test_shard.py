"""Shard layout: two regions, segments found by name, nothing lost between a parameter and its place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_sparse.config import ExcludeSettings
from ds_sparse.shard import Exclusion, Segment, ShardLayout

SEGMENTS = [
    Segment("embed.weight", 4, dense=False),
    Segment("embed.bias", 2, dense=True),
    Segment("head.weight", 3, dense=False),
    Segment("head.bias", 1, dense=True),
]


# ---- exclusion --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, numel, excluded",
    [
        ("layer.weight", 1023, True),  # fewer than min_numel
        ("layer.weight", 1024, False),  # the bound itself is compressed
        ("layer.norm.weight", 5000, True),  # a pattern finds it anywhere in the name
        ("normal", 5000, False),  # `norm\.` is an expression: the dot is a dot
        ("encoder.bias", 5000, True),
        ("encoder.bias.extra", 5000, False),  # `$` anchors
    ],
)
def test_small_and_named_parameters_are_excluded(name: str, numel: int, excluded: bool) -> None:
    settings_ = ExcludeSettings(min_numel=1024, patterns=(r"norm\.", r"bias$"))
    assert Exclusion(settings_).covers(name, numel) is excluded


@pytest.mark.parametrize("name, numel", [("layer.norm.weight", 5000), ("layer.weight", 0)])
def test_with_exclusion_off_nothing_is_excluded(name: str, numel: int) -> None:
    assert not Exclusion(ExcludeSettings(min_numel=0)).covers(name, numel)


def test_patterns_that_find_nothing_are_named() -> None:
    exclusion = Exclusion(ExcludeSettings(patterns=("norm", "typo", "^head")))
    assert exclusion.unused(iter(["head.weight", "layer.norm"])) == ["typo"]  # an iterator is read once
    assert exclusion.unused([]) == ["norm", "typo", "^head"]


# ---- layout -----------------------------------------------------------------------------------------------------


def test_compressed_segments_stand_first_and_each_region_keeps_the_order() -> None:
    layout = ShardLayout(SEGMENTS)
    assert (layout.sparse_numel, layout.numel) == (7, 10)
    assert [segment.name for segment in layout.segments] == [segment.name for segment in SEGMENTS]
    assert [segment.start for segment in layout.segments] == [0, 7, 4, 9]


@pytest.mark.parametrize("dense, sparse_numel", [(True, 0), (False, 10)])
def test_one_region_may_be_empty(dense: bool, sparse_numel: int) -> None:
    layout = ShardLayout([Segment(s.name, s.numel, dense) for s in SEGMENTS])
    assert (layout.sparse_numel, layout.numel) == (sparse_numel, 10)


def test_a_rank_may_own_nothing() -> None:
    layout = ShardLayout([])
    assert (layout.sparse_numel, layout.numel, layout.segments) == (0, 0, [])
    assert layout.flatten_(torch.empty(0), []).numel() == 0


def test_flatten_puts_excluded_entries_behind_the_compressed_ones() -> None:
    tensors = [torch.full((2, 2), 1.0), torch.full((2,), 2.0), torch.full((3,), 3.0), torch.full((1,), 4.0)]
    flat = ShardLayout(SEGMENTS).flatten_(torch.empty(10), tensors)
    assert flat.tolist() == [1, 1, 1, 1, 3, 3, 3, 2, 2, 4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_flatten_turns_every_float_dtype_into_fp32_without_touching_the_source(dtype: torch.dtype) -> None:
    source = torch.tensor([[1.5, -2.0], [0.25, 8.0]], dtype=dtype, requires_grad=True)
    flat = ShardLayout([Segment("w", 4, dense=False)]).flatten_(torch.empty(4), [source.t()])  # not contiguous
    assert flat.dtype == torch.float32 and not flat.requires_grad
    assert flat.tolist() == [1.5, 0.25, -2.0, 8.0]


def test_a_missing_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="got 3 tensors for 4 segments"):
        ShardLayout(SEGMENTS).flatten_(torch.empty(10), [torch.zeros(4), torch.zeros(2), torch.zeros(3)])


def test_views_write_through() -> None:
    flat = torch.zeros(10)
    for number, view in enumerate(ShardLayout(SEGMENTS).views(flat), start=1):
        view.fill_(number)
    assert flat.tolist() == [1, 1, 1, 1, 3, 3, 3, 2, 2, 4]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=8))
def test_views_undo_flatten_for_any_mix_of_segments(shape: list[tuple[int, bool]]) -> None:
    layout = ShardLayout([Segment(str(i), numel, dense) for i, (numel, dense) in enumerate(shape)])
    tensors = [torch.randn(numel) for numel, _ in shape]
    flat = layout.flatten_(torch.full((layout.numel,), torch.nan), tensors)
    assert all(torch.equal(view, tensor) for view, tensor in zip(layout.views(flat), tensors, strict=True))
    assert layout.sparse_numel == sum(numel for numel, dense in shape if not dense)


def test_all_pieces_of_a_parameter_are_found() -> None:
    """ZeRO may cut one parameter into pieces that do not stand side by side."""
    layout = ShardLayout([SEGMENTS[0], SEGMENTS[1], Segment("embed.weight", 5, dense=False)])
    assert [(piece.start, piece.numel) for piece in layout.find("embed.weight")] == [(0, 4), (4, 5)]


def test_an_unknown_parameter_is_named_with_the_nearest_one() -> None:
    with pytest.raises(KeyError, match=r"'embed\.wieght' is on this rank's shard\. Did you mean 'embed\.weight'\?"):
        ShardLayout(SEGMENTS).find("embed.wieght")
