"""The planner: what it predicts by hand and beside the exchanges' own choice; its commands; a probe on forked ranks."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_sparse.cli import main
from ds_sparse.compressors import Quota, TopK
from ds_sparse.config import LinkSettings, parse
from ds_sparse.exchange import choose_exchange
from ds_sparse.planner import CURVES, Job, ProbeError, Row, Speeds, best_row, dense_row, predict, probe, simulate
from examples.launch import environment, free_port
from tests.ranks import run_ranks

LINK = LinkSettings(gbit_per_second=8.0, latency_us=0.0)  # 1 GB/s
JOB = Job(model_size=8_000_000, nodes=4, ranks_per_node=2)
SIZES = ["--model-size", "7e9", "--nodes", "4", "--ranks-per-node", "8"]
PROBE = {
    "inter_node": {"latency_us": 50.0, "gbit_per_second": 8.0},
    "intra_node": {"latency_us": 5.0, "gbit_per_second": 800.0},
    "all_gather_over_all_reduce": 1.5,
    "all_to_all_over_all_reduce": 2.0,
    "select_ns_per_element": 0.1,
    "encode_ns_per_entry": 4.0,
    "sum_ns_per_entry": 5.0,
    "adam_ns_per_element": 0.5,
}


def rows_of(job: Job = JOB, speeds: Speeds | None = None, **more: Any) -> dict[tuple[str, str, str], Row]:
    rows = predict(job, speeds or Speeds(LINK), **more)
    return {(row.method, row.exchange, row.value_dtype): row for row in rows}


def run(capsys: pytest.CaptureFixture[str], *line: str) -> dict[str, Any]:
    assert main([*line, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# ---- predictions ------------------------------------------------------------------------------------------------


def test_dense_by_hand() -> None:
    """A node's link carries 3/4 of 4M fp32 elements twice for each of 2 ranks; or 7/8 of 8M bf16 elements thrice."""
    rows = rows_of()
    dense, alone = rows["dense", "dense", "fp32"], rows["DeepSpeed alone", "ring", ""]
    assert (dense.sent_bytes, dense.seconds) == (24_000_000, pytest.approx(0.048))
    assert (alone.sent_bytes, alone.seconds) == (21_000_000, pytest.approx(0.042))
    whole = rows_of(Job(8_000_000, 4, 2, gradient_bytes=4))["DeepSpeed alone", "ring", ""]
    assert whole.seconds == pytest.approx(2 * alone.seconds)
    assert dense_row(list(rows.values())) == alone


def test_state_is_sharded_over_a_node_and_not_over_all() -> None:
    """Bytes an element of a shard of 4M: Adam 12; residual and momentum 4 each; what owners keep, 4."""
    states = {key[:2]: row.state_bytes // 4_000_000 for key, row in rows_of().items()}
    assert states == {
        ("DeepSpeed alone", "ring"): 3,  # 12 over 4 nodes
        ("dense", "dense"): 12,
        ("sparse_momentum", "all_gather"): 20,
        ("sparse_momentum", "reduce_scatter"): 24,
        ("sparse_gradient", "all_gather"): 12,
        ("sparse_gradient", "reduce_scatter"): 16,
    }


@pytest.mark.parametrize("nodes", [2, 4, 64])
@pytest.mark.parametrize("gbit", [0.05, 1.0, 10.0, 1000.0])
def test_the_plan_is_what_a_run_chooses(nodes: int, gbit: float) -> None:
    """One cost model: the same exchange as at a run's start, and dense where that goes dense."""
    link, job = LinkSettings(gbit_per_second=gbit, latency_us=100.0), Job(80_000_000, nodes, 2)
    config = parse({"exchange": {"link": link.model_dump()}})
    peers: Any = SimpleNamespace(size=nodes, rank=0)
    chosen, _ = choose_exchange(config, peers, 2, Quota(TopK(), 0.01, job.shard), 0)
    rows = rows_of(job, Speeds(link))
    by_time = sorted(
        (rows[key] for key in rows if key[0] in ("dense", "sparse_momentum") and key[2] == "fp32"),
        key=lambda row: row.seconds,
    )
    expected = "dense" if chosen is None else type(chosen).__name__
    assert expected.lower() == f"{by_time[0].exchange.replace('_', '')}exchange".replace("denseexchange", "dense")


def test_a_probe_changes_what_is_predicted(tmp_path: Path) -> None:
    """Every figure in it counts."""
    (tmp_path / "probe.json").write_text(json.dumps(PROBE))
    base = rows_of(speeds=Speeds.from_probe(tmp_path / "probe.json"))["sparse_momentum", "reduce_scatter", "int8"]
    for key, value in PROBE.items():
        for name in value if isinstance(value, dict) else [""]:
            worse: Any = {**value, name: value[name] * (0.5 if "gbit" in name else 2.0)} if name else 2.0 * value
            (tmp_path / "worse.json").write_text(json.dumps(PROBE | {key: worse}))
            rows = rows_of(speeds=Speeds.from_probe(tmp_path / "worse.json"))
            assert rows["sparse_momentum", "reduce_scatter", "int8"].total > base.total, (key, name)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not valid JSON"),
        ("{}", "is not what 'ds_sparse probe' writes: KeyError('inter_node'). What to do: run the probe again."),
        (json.dumps(PROBE | {"inter_node": {"latency_us": 1.0, "gbit_per_second": -1.0}}), "is not what"),
        (json.dumps(PROBE | {"inter_node": None}), "was measured on one node"),
    ],
)
def test_a_file_that_is_no_probe_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, words: str
) -> None:
    file = tmp_path / "probe.json"
    file.write_text(content)
    with pytest.raises(ProbeError, match="probe.json") as refused:
        Speeds.from_probe(file)
    assert words in str(refused.value)
    assert main(["plan", *SIZES, "--probe", str(file)]) == 3
    assert capsys.readouterr().err == f"{refused.value}\n"


# ---- ds_sparse plan ---------------------------------------------------------------------------------------------


def test_a_slow_link_gets_a_section_that_can_be_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "section.json"
    line = ("plan", *SIZES, "--gbit-per-second", "10", "--compute-seconds", "1", "--write", str(file))
    result = run(capsys, *line)
    (best,) = (row for row in result["rows"] if row["best"])
    assert (best["method"], best["density"]) == ("sparse_momentum", 0.01)
    assert best["step_seconds"] == pytest.approx(1.0 + best["communication_seconds"])
    section = json.loads(file.read_text())
    assert section == result["section"]
    config = parse(section["compressed_communication"])
    assert (config.exchange.type, config.exchange.value_dtype) == (best["exchange"], best["value_dtype"])
    assert "not over all 32" in result["memory"] and "2.62 GB" in result["memory"]
    assert main(list(line)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert result["verdict"] in shown and all(assumed in shown for assumed in result["assumptions"])


def test_a_fast_link_gets_the_advice_to_leave_it_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "section.json"
    result = run(capsys, "plan", *SIZES, "--gbit-per-second", "3200", "--latency-us", "5", "--write", str(file))
    assert result["verdict"].startswith("Leave compression off: dense is faster here (DeepSpeed alone, ")
    assert json.loads(file.read_text()) == {"compressed_communication": {"enabled": False}}


def test_the_best_is_the_fastest_at_its_density() -> None:
    rows = predict(JOB, Speeds(LINK), densities=(0.001, 0.05))
    best = best_row(rows, 0.05)
    assert best.density == 0.05
    assert best.total == min(row.total for row in rows if row.density in (0.05, 1.0))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["plan", "--model-size", "7e9", "--nodes", "1", "--ranks-per-node", "8"], "with 1 node nothing crosses nodes"),
        (["plan", *SIZES], "one of the arguments --probe --gbit-per-second is required"),
        (["plan", *SIZES, "--gbit-per-second", "0"], "'0' is not above 0"),
        (["plan", *SIZES, "--gbit-per-second", "10", "--density", "2"], "'2' is no density"),
        (["plan", "--model-size", "7.5", "--nodes", "2"], "'7.5' is no whole number"),
        (["simulate", *SIZES, "--gbit-per-second", "x"], "'x' is no number"),
    ],
)
def test_wrong_words_have_status_2(line: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "simulate", "probe"])
def test_every_status_is_in_the_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    told = capsys.readouterr().out
    assert all(f"\n  {status}  " in told for status in {"plan": "0234", "simulate": "02345", "probe": "01234"}[command])


@pytest.mark.parametrize("line", [["plan", "--write"], ["simulate", "--csv"], ["simulate", "--plot"]])
def test_a_file_that_cannot_be_written_has_status_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: list[str]
) -> None:
    file = tmp_path / "nowhere" / "file.png"
    assert main([line[0], *SIZES, "--gbit-per-second", "10", line[1], str(file)]) == 4
    assert capsys.readouterr().err == f"{file} cannot be written: No such file or directory\n"


# ---- ds_sparse simulate -----------------------------------------------------------------------------------------


def test_curves_have_the_shapes_that_the_exchanges_have() -> None:
    points = simulate(Job(7_000_000_000, 1000, 8), Speeds(LINK), 0.01, "fp32")
    sent = {curve: {p.nodes: p.sent_bytes for p in points if p.curve == curve} for curve in CURVES}
    assert list(sent["all_gather"]) == [2, 4, 8, 16, 32, 64, 128, 256, 512, 1000]
    assert sent["all_gather"][1000] == 999 * sent["all_gather"][2]
    assert max(sent["reduce_scatter"].values()) < 1.2 * min(sent["reduce_scatter"].values())
    assert sent["two-level dense"][1000] == pytest.approx(2 * sent["two-level dense"][2], rel=2e-3)  # 2 (m-1)/m
    ring = sent["dense ring (DeepSpeed alone)"]
    assert ring[1000] == pytest.approx(16 / 15 * ring[2], rel=1e-3)  # (P-1)/P of 16 ranks, and of 8000


def test_simulate_writes_its_points_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    matplotlib_image = pytest.importorskip("matplotlib.image")
    picture, table = tmp_path / "curves.png", tmp_path / "curves.csv"
    line = ("simulate", *SIZES, "--gbit-per-second", "10", "--plot", str(picture), "--csv", str(table))
    result = run(capsys, *line)
    with table.open(newline="") as file:
        assert list(csv.DictReader(file)) == [{k: str(v) for k, v in one.items()} for one in result["points"]]
    pixels = matplotlib_image.imread(picture)
    assert pixels.shape[1] > 1000 and len({tuple(pixel) for pixel in pixels.reshape(-1, 4)[::7]}) > 20  # not blank
    assert main(list(line)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert all(assumed in shown for assumed in result["assumptions"])


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert main(["simulate", *SIZES, "--gbit-per-second", "10", "--plot", str(tmp_path / "x.png")]) == 5
    assert "What to do: pip install 'ds_sparse[plots]'" in capsys.readouterr().err


# ---- ds_sparse probe --------------------------------------------------------------------------------------------


def _probe_small() -> tuple[dict[str, Any], list[str]]:
    torch.set_num_threads(1)
    probe.SENT_BYTES, probe.NUMEL, probe.ENTRIES, said = (1 << 12, 1 << 16, 1 << 18), 1 << 16, 1 << 10, []
    return probe.run_probe(2, said.append), said


def test_a_probe_measures_both_links_and_the_work(tmp_path: Path) -> None:
    ranks = run_ranks(4, _probe_small)
    found, said = ranks[0]
    assert len(said) == probe.STEPS
    assert (found["nodes"], found["ranks_per_node"], found["device"]) == (2, 2, "cpu")
    assert len(found["collectives"]) == 2 * 3 * 3
    for point in found["collectives"]:  # as many bytes as were wanted, to a few elements
        assert any(abs(point["sent_bytes"] - size) <= 8 for size in (1 << 12, 1 << 16, 1 << 18))
        assert point["seconds"] > 0.0
    timed = [key for key in found if "_ns_per_" in key or "_over_" in key]
    assert len(timed) == 6 and all(found[key] > 0.0 for key in timed if key != "select_ns_per_element")
    (tmp_path / "probe.json").write_text(json.dumps(found))
    speeds = Speeds.from_probe(tmp_path / "probe.json")
    assert speeds.link.gbit_per_second > 0.0 and speeds.node is not None and speeds.adam > 0.0


def test_a_link_is_measured_by_what_more_bytes_take() -> None:
    """10 us a round and 1 GB/s of each of two ranks, with a burst of 50 kB for free; gathers at half the rate."""

    def points(rounds: int, slower: float) -> list[tuple[int, float]]:
        return [(0, rounds * 1e-5), (10**6, slower * 0.95e-3), (4 * 10**6, slower * 3.95e-3)]

    measured = probe.Measured(
        "inter", 3, {"all_reduce": points(6, 1.0), "all_gather": points(3, 2.0), "all_to_all": points(3, 1.0)}
    )
    settings = measured.settings(sharing=2)
    assert settings == {"latency_us": pytest.approx(10.0), "gbit_per_second": pytest.approx(16.0)}
    assert measured.over_all_reduce("all_gather") == pytest.approx(2.0)
    assert measured.over_all_reduce("all_to_all") == pytest.approx(1.0)


def test_a_probe_that_is_no_job_says_how_to_start_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["probe", "--out", "probe.json"]) == 3
    said = capsys.readouterr().err
    assert "was not started as a job: RANK" in said and "deepspeed --module ds_sparse probe --out probe.json" in said


@pytest.mark.launcher
def test_the_launcher_starts_a_probe(tmp_path: Path) -> None:
    """Only rank 0 prints and writes; what it wrote is what `plan` reads."""
    file = tmp_path / "probe.json"
    command = ["deepspeed", "--num_accelerators", "2", "--master_port", str(free_port())]
    command += ["--module", "ds_sparse", "probe", "--ranks-per-node", "1", "--out", str(file)]
    env = environment() | {"PYTHONPATH": os.getcwd()}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "".join(done.stdout.split()).count(f"writtento{file}") == 1  # lines are broken to fit a terminal
    assert json.loads(file.read_text())["nodes"] == 2
    assert main(["plan", *SIZES, "--probe", str(file)]) == 0
