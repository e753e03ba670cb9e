"""The page "Communication" in TensorBoard: its charts hold the data of a run, over HTTP and in a browser."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_sparse.feedback import Selection
from ds_sparse.monitor import DENSITIES, LAYOUT, PAGE, THRESHOLDS, selected
from ds_sparse.shard import Segment, ShardLayout
from tests.browser import EXECUTABLE, Browser
from tests.engines import backward, build_config, build_engine
from tests.ranks import run_ranks

STEPS, EVERY, SAMPLES = 12, 4, 8  # SAMPLES: of a step, over both ranks
COMPRESSED = {
    "method": "sparse_gradient",
    "fallback": "off",
    "compressor": {"density": 0.05},
    "schedule": {"densities": [0.5], "steps_per_density": 4},
    "exclude": {"min_numel": 20, "patterns": [r"^4\."]},
    "monitor": {"histogram_interval": EVERY},
}
RUNS = {
    "compressed": COMPRESSED,
    "dense": {"method": "dense"},
    "off": {"method": "dense", "monitor": {"enabled": False}},
}
PATIENCE = 60.0  # seconds for what takes three on a machine with nothing else to do


# ---- what a step selected ---------------------------------------------------------------------------------------


def test_entries_are_sorted_by_the_parameter_that_they_belong_to() -> None:
    segments = Segment("a", 5, False), Segment("bias", 9, True), Segment("b", 3, False), Segment("c", 8, False)
    layout = ShardLayout(segments)
    first = Selection(slice(0, 6), torch.tensor([0, 4, 5], dtype=torch.int32), torch.tensor([3.0, 2.0, 7.0]))
    second = Selection(slice(6, 16), torch.tensor([0], dtype=torch.int32), torch.tensor([5.0]))
    found = selected(layout, [first, second])
    assert found.names == ["a", "b", "c"]
    assert found.density.tolist() == pytest.approx([2 / 5, 2 / 3, 0.0])
    assert found.smallest.tolist() == [2.0, 5.0, math.inf]
    assert found.thresholds().tolist() == [2.0, 5.0]


# ---- TensorBoard ------------------------------------------------------------------------------------------------


def _logged(folder: str) -> tuple[dict[str, int], list[float]]:
    """Trains each run; sizes of the compressed parameters, and the densities of the run that has them."""
    densities: list[float] = []
    for name, section in RUNS.items():
        monitors = {
            "tensorboard": {"enabled": True, "output_path": folder, "job_name": name},
            "csv_monitor": {"enabled": True, "output_path": folder, "job_name": f"{name}.csv"},
        }
        topology = {"topology": {"ranks_per_node": 1}}
        engine = build_engine(build_config(optimizer="SGD0", section=section | topology, **monitors))
        for step in range(STEPS):
            backward(engine, step)
            engine.step()
            if name == "compressed":
                densities.append(engine.compressed_communication.stats.last.density)
        assert engine.compressed_communication._level2.method.feedback is None or name == "compressed"
        if name == "compressed":
            segments = engine.compressed_communication._level2.layout.segments
            sizes = {segment.name: segment.numel for segment in segments if not segment.dense}
    return sizes, densities


class Board:
    """A running TensorBoard.

    Attributes:
        sizes, densities: of the compressed run on rank 0, as the engine has them.
    """

    def __init__(self, url: str, folder: Path, sizes: dict[str, int], densities: list[float]) -> None:
        self.url, self.folder, self.sizes, self.densities = url, folder, sizes, densities

    def get(self, route: str, **query: str) -> Any:
        with urllib.request.urlopen(f"{self.url}data/plugin/{route}?{urllib.parse.urlencode(query)}") as answer:
            return json.load(answer)

    def series(self, run: str, pattern: str) -> dict[str, list[list[float]]]:
        """tag -> [wall time, x, value] of each point, of the tags that a line of a chart takes."""
        return self.get("custom_scalars/scalars", run=run, tag=pattern)["tag_to_events"]


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Board]:
    folder, log = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("log") / "tensorboard.log"
    sizes, densities = run_ranks(2, _logged, str(folder))[0]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--port", "0"]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        deadline, found = time.monotonic() + PATIENCE, None
        while (found := re.search(r"http://\S+", log.read_text())) is None:
            assert time.monotonic() < deadline and process.poll() is None, log.read_text()
            time.sleep(0.1)
        board = Board(found[0], folder, sizes, densities)
        while set(board.get("scalars/tags")) != set(RUNS):  # read in the background
            assert time.monotonic() < deadline, "TensorBoard did not find the runs"
            time.sleep(0.1)
        yield board
    finally:
        process.terminate()
        process.wait()


def test_every_chart_holds_every_step(board: Board) -> None:
    (page,) = board.get("custom_scalars/layout")["category"]
    assert (page["title"], [chart["title"] for chart in page["chart"]]) == (PAGE, list(LAYOUT[PAGE]))
    for chart in page["chart"]:
        every_step = [SAMPLES * (step + 1) for step in range(STEPS)]
        wanted = every_step[EVERY - 1 :: EVERY] if chart["title"] == "density by parameter" else every_step
        for pattern in chart["multiline"]["tag"]:
            found = board.series("compressed", pattern)
            assert len(found) == (len(board.sizes) if pattern == f"^{DENSITIES}" else 1), pattern
            for points in found.values():
                assert [x for _, x, _ in points] == wanted
                assert all(math.isfinite(value) for _, _, value in points)


def test_scalars_are_those_of_the_engine(board: Board) -> None:
    (points,) = board.series("compressed", "^Comm/density$").values()
    assert [value for _, _, value in points] == pytest.approx(board.densities)  # fp32 in the file
    by_parameter = board.series("compressed", f"^{DENSITIES}")
    assert set(by_parameter) == {DENSITIES + name for name in board.sizes}
    for i in range(STEPS // EVERY):
        sent = sum(by_parameter[DENSITIES + name][i][2] * numel for name, numel in board.sizes.items())
        assert sent / sum(board.sizes.values()) == pytest.approx(board.densities[EVERY * (i + 1) - 1])


def test_what_is_switched_off_is_not_written(board: Board) -> None:
    tags = board.get("scalars/tags")
    assert "Comm/density" in tags["dense"] and not any(tag.startswith(DENSITIES) for tag in tags["dense"])
    assert "Train/Samples/lr" in tags["off"] and not any(tag.startswith("Comm") for tag in tags["off"])
    assert set(board.get("histograms/tags")) == {"compressed"}


def test_thresholds_are_a_histogram(board: Board) -> None:
    histograms = board.get("histograms/histograms", run="compressed", tag=THRESHOLDS)
    assert [x for _, x, _ in histograms] == [SAMPLES * EVERY * (i + 1) for i in range(STEPS // EVERY)]
    densities = board.series("compressed", f"^{DENSITIES}").values()
    for i, (_, _, bins) in enumerate(histograms):
        assert sum(count for _, _, count in bins) == sum(points[i][2] > 0.0 for points in densities) > 0
        assert bins[0][0] >= 0.0


def test_csv_holds_the_scalars_too(board: Board) -> None:
    written = {path.stem for path in (board.folder / "compressed.csv").glob("Comm*.csv")}
    wanted = {tag for tag in board.get("scalars/tags")["compressed"] if tag.startswith("Comm")}
    assert written == {tag.replace("/", "_") for tag in wanted}


# TensorBoard's elements have shadow trees, which querySelectorAll does not enter.
CHARTS = """(() => {
    const find = (root, name) => [...root.querySelectorAll('*')].flatMap(element => [
        ...(element.matches(name) ? [element] : []), ...(element.shadowRoot ? find(element.shadowRoot, name) : [])]);
    const points = path => ((path.getAttribute('d') || '').match(/[ML]/g) || []).length;
    return find(document, 'tf-custom-scalar-multi-line-chart-card').map(card => [
        card.title, Math.max(0, ...find(card.shadowRoot, 'path.line').map(points))]);
})()"""


@pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium on this machine; its data is checked over HTTP above")
def test_a_browser_draws_every_point(board: Board, tmp_path: Path) -> None:
    picture = tmp_path / "dashboard.png"  # pytest keeps it
    points = dict.fromkeys(LAYOUT[PAGE], STEPS) | {"density by parameter": STEPS // EVERY}
    with Browser((1400, 1000)) as browser:
        browser.open(f"{board.url}#custom_scalars")
        drawn = browser.wait_for(CHARTS, lambda charts: dict(charts or ()) == points, PATIENCE)
        browser.screenshot(picture)
    assert [title for title, _ in drawn] == list(LAYOUT[PAGE])
    assert picture.read_bytes().startswith(b"\x89PNG")
