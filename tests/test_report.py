"""`ds_sparse report`: the figures follow from the logs, whichever monitor wrote them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils.tensorboard import SummaryWriter

from ds_sparse.accounting import PARTS, CommStats
from ds_sparse.cli import main, report
from ds_sparse.monitor import events
from ds_sparse.report.logs import LOSS, read_runs

STEPS, SAMPLES = 4, 16
SPLIT = dict(zip(PARTS, (0.001, 0.002, 0.004, 0.008, 0.016), strict=True))  # seconds


def scalars(sent: int) -> list[tuple[str, float, int]]:
    """Of a run that is dense for two steps, then sends `sent` bytes at density 0.01, then skips a step."""
    stats, found = CommStats(), []
    for step in range(STEPS):
        exchanged, dense = step < STEPS - 1, step < 2
        if exchanged:
            stats.count_bytes("inter", 8000 if dense else sent)
            for part in PARTS[:-1]:
                setattr(stats._open, f"{part}_seconds", SPLIT[part])
        stats.ask(1.0 if dense else 0.01)
        dense_bytes, density = 8000 if exchanged else 0, 1.0 if dense else 0.0125
        stats.close(exchanged=exchanged, dense_bytes=dense_bytes, seconds=sum(SPLIT.values()), density=density)
        samples = SAMPLES * (step + 1)
        found += events(stats, 2.0, 4.0, samples) + [(LOSS, 3.0 - step, samples)]
    return found


def write_events(folder: Path, sent: int = 500) -> Path:
    """As DeepSpeed's TensorBoard monitor does; a point takes a tenth of a second."""
    with SummaryWriter(str(folder)) as writer:
        for tag, value, samples in scalars(sent):
            writer.add_scalar(tag, value, samples, walltime=1e9 + 0.1 * samples / SAMPLES)
    return folder


def write_csv(folder: Path, sent: int = 500) -> Path:
    """As DeepSpeed's CSV monitor does in a run that was resumed and is under way."""
    folder.mkdir(parents=True)
    for tag, value, samples in scalars(sent):
        with open(folder / f"{tag.replace('/', '_')}.csv", "a") as file:
            head = f"step,{tag.split('/')[-1]}\n" if samples in (SAMPLES, 3 * SAMPLES) else ""
            file.write(f"{head}{samples},{value}\n")
    for path in folder.glob("*.csv"):
        path.write_text(path.read_text() + "80")  # being written
    return folder


def result_of(capsys: pytest.CaptureFixture[str], *line: str | Path) -> dict[str, Any]:
    assert main(["report", *map(str, line), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


EXPECTED = {
    "steps": 4, "skipped": 1, "loss": 0.0,
    "inter_node_bytes": 16500 / 4, "inter_node_bytes_last": 0.0, "intra_node_bytes": 0.0, "dense_bytes": 6000.0,
    "dense_over_wire": 24000 / 16500, "dense_over_wire_last": 1.0, "gb_saved": 7.5e-6,
    "density_asked": 0.01, "density": 0.0125, "residual_over_gradient": 0.5,
    # Nothing was timed in the skipped step but the whole, which is then rest.
    "seconds": 0.031, "select_seconds": 0.00075, "encode_seconds": 0.0015, "exchange_seconds": 0.003,
    "decode_seconds": 0.006, "rest_seconds": 0.01975,
}  # fmt: skip


@pytest.mark.parametrize(("write", "wall"), [(write_events, 0.3), (write_csv, None)])
def test_figures_follow_from_the_scalars(
    write: Any, wall: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "first")
    (run,) = result_of(capsys, folder)["runs"]
    assert (run.pop("name"), run.pop("folder")) == ("first", str(folder))
    assert run.pop("wall_seconds") == (wall and pytest.approx(wall))
    assert run == {key: pytest.approx(value, rel=1e-6) for key, value in EXPECTED.items()}  # fp32 in event files


def test_runs_are_found_below_a_folder_and_set_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    write_events(tmp_path / "runs" / "sparse")
    write_csv(tmp_path / "runs" / "more" / "sparser", sent=100)
    (tmp_path / "runs" / "table.csv").write_text("rank,loss\n0,1\n")  # of something else
    assert main(["report", str(tmp_path / "runs")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert next(line.split() for line in lines if "sparse" in line) == ["more/sparser", "sparse"]
    cells = {re.split(r"\s{2,}", line.strip())[0]: re.split(r"\s{2,}", line.strip())[1:] for line in lines}
    assert cells["bytes across nodes, a step"] == ["4,025", "4,125"]
    assert cells["dense/wire, whole run"] == ["1.5x", "1.5x"]
    assert cells["seconds of the run, from its first log entry"] == ["-", "0.3"]
    assert cells["decode"] == ["0.0060", "0.0060"]


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    folders = [write_csv(tmp_path / parent / "run") for parent in ("a", "b")]
    assert [run.name for run in read_runs([*folders, folders[0]])] == [str(folder) for folder in folders]


def test_a_loss_of_another_name_is_found(tmp_path: Path) -> None:
    for name, rows in {"train_loss": 3, "eval_loss": 2, "Train_Samples_loss_scale": 9}.items():
        (tmp_path / f"{name}.csv").write_text("step,x\n" + "".join(f"{i},{i}\n" for i in range(rows)))
    assert read_runs([tmp_path])[0].loss().values == [0.0, 1.0, 2.0]


# ---- pictures ---------------------------------------------------------------------------------------------------


def test_the_page_holds_the_table_and_every_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    write_events(tmp_path / "runs" / "a<b")
    write_csv(tmp_path / "runs" / "other", sent=100)
    out = tmp_path / "report"
    files = result_of(capsys, tmp_path / "runs", "--out", out)["files"]
    assert files == [str(out / name) for name in ("bytes.png", "time.png", "density.png", "loss.png", "index.html")]
    page = (out / "index.html").read_text()
    assert page.count("data:image/png;base64,") == 4
    assert "<th>a&lt;b</th><th>other</th>" in page and "<td>4,125</td><td>4,025</td>" in page
    assert not re.search(r"(src|href)=\"(?!data:)", page)  # needs no other file


def test_what_there_is_no_data_for_is_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "Train_Samples_train_loss.csv").write_text("step,train_loss\n4,1.5\n8,1.25\n")
    files = result_of(capsys, tmp_path / "run", "--out", tmp_path / "out")["files"]
    assert [Path(file).name for file in files] == ["loss.png", "index.html"]


def test_lines_hold_the_scalars(tmp_path: Path) -> None:
    """Over samples, over seconds; a skipped step, which sent nothing, has no place on a logarithmic axis."""
    plots = pytest.importorskip("ds_sparse.report.plots")
    runs = read_runs([write_events(tmp_path / "run")])
    sent, dense = plots.PICTURES["bytes"](runs).axes[0].lines
    assert sent.get_xydata().tolist() == [[16, 8000], [32, 8000], [48, 500]]
    assert dense.get_ydata().tolist() == [8000] * 3
    over_samples, over_time = (axis.lines[0].get_xydata() for axis in plots.PICTURES["loss"](runs).axes)
    assert over_samples.tolist() == [[16, 3], [32, 2], [48, 1], [64, 0]]
    assert over_time[:, 0].tolist() == pytest.approx([0.0, 0.1, 0.2, 0.3], abs=1e-6)  # of a clock with 10 digits before
    bars = plots.PICTURES["time"](runs).axes[0].patches
    assert [bar.get_width() for bar in bars] == pytest.approx([1e3 * EXPECTED[f"{part}_seconds"] for part in PARTS])
    plots.plt.close("all")


# ---- failures ---------------------------------------------------------------------------------------------------


def test_failures_have_their_words_and_their_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "absent")]) == report.UNREADABLE
    assert capsys.readouterr().err == f"{tmp_path}/absent cannot be read: it is not a folder\n"
    assert main(["report", str(tmp_path)]) == report.NO_SCALARS
    told = capsys.readouterr().err
    assert told.startswith(f"{tmp_path}: no scalars there.") and "'csv_monitor' on in ds_config.json" in told


def test_without_matplotlib_the_table_works_and_pictures_name_the_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "ds_sparse.report.plots", raising=False)
    folder = str(write_csv(tmp_path / "run"))
    assert main(["report", folder]) == 0
    capsys.readouterr()
    assert main(["report", folder, "--out", str(tmp_path / "out")]) == report.NO_MATPLOTLIB
    assert capsys.readouterr().err.endswith("What to do: pip install 'ds_sparse[plots]'\n")
    assert not (tmp_path / "out").exists()


def test_every_status_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["report", "--help"])
    told = capsys.readouterr().out
    statuses = 0, 2, report.UNREADABLE, report.NO_SCALARS, report.NO_MATPLOTLIB
    assert all(f"\n  {status}  " in told for status in statuses)
