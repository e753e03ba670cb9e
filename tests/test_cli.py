"""The command line: its words, its exit statuses, and the JSON it prints."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from ds_sparse.adapter.preview import preview
from ds_sparse.cli import check, main, versions
from ds_sparse.config import CommunicationConfig, parse
from ds_sparse.errors import ConfigError
from ds_sparse.ops import backend_info
from tests.engines import OPTIMIZERS, build_config
from tests.multirank.test_refusals import CASES

ROOT = Path(__file__).resolve().parents[1]
SECTION = {"method": "sparse_momentum", "compressor": {"density": 0.05, "samplings": None}}
NEED_AN_ENGINE = {"world not divisible", "everything excluded", "larger than dense"}


def written(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "ds_config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def result_of(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What a check that succeeds prints as JSON."""
    assert main(["check", str(path), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# ---- what cannot be run -----------------------------------------------------------------------------------------

FAILURES = {
    "not JSON": ('{"train_batch_size": 4', 4, "is not valid JSON: "),
    "no text": ("\x00", 4, "is not a JSON object"),
    "a key twice": ('{"a": {"b": 1, "b": 2}}', 4, "the key 'b' stands twice in one object"),
    "a list": ("[1, 2]", 4, "is not a JSON object, as ds_config.json must be: it starts '[1, 2]'"),
    "no section": (build_config(), 5, "has no section 'compressed_communication': DeepSpeed runs as without ds_sparse"),
    "disabled": (build_config(section={"enabled": False}), 6, "'compressed_communication.enabled' is false in "),
    "wrong value": (build_config(section={"compressor": {"density": 2}}), 1, "compressor.density' is 2; allowed is a"),
    "not a section": (build_config(section={}) | {"compressed_communication": 3}, 1, "is 3; it must be an object"),
    "ZeRO's elastic checkpoints": (
        build_config(section=SECTION, zero_optimization={"elastic_checkpoint": True}), 1,
        "'zero_optimization.elastic_checkpoint' is true; with",
    ),
    "another optimizer": (build_config(optimizer="SGD", section=SECTION), 1, "the optimizer is SGD; allowed is Adam"),
    "refused by DeepSpeed": (
        build_config(section=SECTION, zero_optimization={"stag": 1}), 1,
        "outside 'compressed_communication', DeepSpeed refuses the configuration: 1 validation error",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_has_its_words_and_its_status(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, status, words = FAILURES[case]
    path = written(tmp_path, content)
    assert main(["check", str(path)]) == status
    plain = capsys.readouterr()
    assert words in plain.err and plain.out == ""
    assert main(["check", str(path), "--json"]) == status
    machine = capsys.readouterr()
    assert json.loads(machine.out) == {"ok": False, "status": status, "error": plain.err.removesuffix("\n")}
    assert machine.err == ""


def test_a_file_that_cannot_be_read_has_its_words_and_its_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(tmp_path / "absent.json")]) == 3
    assert capsys.readouterr().err == f"{tmp_path}/absent.json cannot be read: No such file or directory\n"
    assert main(["check", str(tmp_path)]) == 3
    assert capsys.readouterr().err == f"{tmp_path} cannot be read: Is a directory\n"
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    assert main(["check", str(tmp_path / "binary.json")]) == 4


def test_the_words_of_the_configuration_are_given_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section = {"compresor": {"density": 0.01}}
    with pytest.raises(ConfigError) as refused:
        parse(section)
    assert main(["check", str(written(tmp_path, build_config(section=section)))]) == 1
    assert capsys.readouterr().err == f"{refused.value}\n"


def test_every_status_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    statuses = {0, 2, check.UNREADABLE} | {status for _, status, _ in FAILURES.values()}
    assert all(f"\n  {status}  " in told for status in statuses)
    assert "ds_sparse check ds_config.json\n" in told


@pytest.mark.parametrize("line", [[], ["chek"], ["check"], ["check", "x.json", "--jason"]])
def test_a_line_that_cannot_be_understood_has_status_2(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: ds_sparse")


@pytest.mark.parametrize("case", sorted(CASES.keys() - NEED_AN_ENGINE))
def test_what_an_engine_refuses_is_refused_from_the_file_alone(case: str) -> None:
    config, setting, remedy = CASES[case]
    with pytest.raises(ConfigError) as refused:
        preview(config, parse(config["compressed_communication"]))
    assert setting in str(refused.value) and remedy in str(refused.value)


# ---- what can be run --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.json")), ids=lambda path: path.stem)
def test_the_ready_made_files_can_be_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert result_of(path, capsys)["ok"] is True


def test_the_json_says_what_will_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, build_config(stage=2, dtype="bf16", section=SECTION))
    result = result_of(path, capsys)
    settings, packages = result.pop("settings"), result.pop("versions")
    assert result == {
        "ok": True,
        "status": 0,
        "config": str(path),
        "method": {"name": "sparse_momentum", "description": check.describe(parse(SECTION))},
        "deepspeed": {"zero_stage": 2, "optimizer": "AdamW", "precision": "bf16"},
        "kernels": backend_info(),
        "notes": [],
    }
    assert {key for key, entry in settings.items() if entry["set"]} == {
        "method", "compressor.density", "compressor.samplings",
    }  # fmt: skip
    assert settings["compressor.density"]["value"] == 0.05
    assert settings["fallback"] == {"value": "dense", "set": False}
    assert settings["schedule.densities"] == {"value": [], "set": False}
    assert packages["deepspeed"]["version"] == importlib.metadata.version("deepspeed")
    assert packages["deepspeed"]["supported"] is True
    assert set(packages) == {"ds_sparse", "deepspeed", "torch", "cupy", "Python"}


def test_the_tables_say_the_same_without_colour(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, build_config(section=SECTION))
    assert main(["check", str(path)]) == 0
    told = capsys.readouterr().out
    assert "\x1b" not in told
    rows = [tuple(line.split()) for line in told.splitlines()]
    assert ("compressor.density", "0.05", "set") in rows and ("fallback", '"dense"', "default") in rows
    assert ("compressor.samplings", "left", "out", "set") in rows
    assert ("ZeRO", "stage", "1") in rows and ("optimizer", "AdamW") in rows and ("precision", "fp32") in rows
    assert any(row[:2] == ("cpu", backend_info()["cpu"]["tier"].split()[0]) for row in rows)
    assert " ".join(told.split()).count("can be run. sparse_momentum: Every step sends the whole gradient") == 1


def test_comments_are_read_as_deepspeed_reads_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = json.dumps(build_config(section=SECTION), indent=1).replace("{\n", "{\n  # Hjson has comments\n", 1)
    assert result_of(written(tmp_path, text), capsys)["ok"] is True


def test_batch_sizes_that_only_the_launcher_can_judge_are_let_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    assert result_of(written(tmp_path, build_config(section=SECTION) | sizes), capsys)["ok"] is True


def test_what_was_not_checked_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adam = {"type": "AdamW", "params": {"lr": "auto"}}
    path = written(tmp_path, build_config(section=SECTION) | {"optimizer": adam, "gradient_clipping": "auto"})
    (note,) = result_of(path, capsys)["notes"]
    assert note.startswith("not checked") and note.endswith(": gradient_clipping, optimizer.params.lr")


def test_an_optimizer_of_the_script_is_left_to_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = build_config(section=SECTION)
    del config["optimizer"]
    assert result_of(written(tmp_path, config), capsys)["deepspeed"]["optimizer"] is None
    assert main(["check", str(tmp_path / "ds_config.json")]) == 0
    assert "made by the script" in capsys.readouterr().out


def test_advice_is_given_as_at_the_start_of_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, build_config(section={"method": "sparse_gradient"}))
    assert any("Use method 'sparse_momentum'" in note for note in result_of(path, capsys)["notes"])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_optimizer_of_the_file_is_told_as_deepspeed_builds_it(optimizer: str) -> None:
    built = {"AdamW": "AdamW", "AdamL2": "Adam", "SGD": "SGD", "SGD0": "SGD"}
    config = build_config(optimizer=optimizer, section={"method": "dense"})
    assert preview(config, parse({"method": "dense"})).optimizer == built[optimizer]


# ---- parts ------------------------------------------------------------------------------------------------------


def test_every_method_is_described() -> None:
    assert set(check.DESCRIPTIONS) == set(get_args(CommunicationConfig.model_fields["method"].annotation))


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"method": "dense"}, "Every step sends the whole gradient across nodes: the control to compare with."),
        (
            {"method": "sparse_gradient", "schedule": {"dense_steps": 9, "densities": [0.25], "steps_per_density": 5}},
            "After 9 dense steps, every step sends 1 % of the gradient across nodes (mstopk, down from 25 %) and keeps "
            "the rest, to add it at the next step.",
        ),
        (
            {"method": "sparse_gradient", "compressor": {"type": "topk"}, "error_feedback": {"enabled": False}},
            "Every step sends 1 % of the gradient across nodes (topk) and drops the rest.",
        ),
        (
            {"sparse_momentum": {"freeze_step": 40}, "compressor": {"type": "identity"}},
            "Every step sends the whole gradient across nodes until step 40; then the variance is frozen, and every "
            "step sends 100 % of Adam's first moment.",
        ),
    ],
)
def test_the_method_in_one_sentence(section: dict[str, Any], sentence: str) -> None:
    assert check.describe(parse(section)) == sentence


@pytest.mark.parametrize(
    ("version", "fits"),
    [("0.19.8", True), ("0.16.9", True), ("0.16.8", False), ("0.20.0", False), (None, False)],
)
def test_a_deepspeed_that_is_not_supported_is_told(
    version: str | None, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "_installed", lambda package: version if package == "deepspeed" else "1.0")
    entry = versions.versions()["deepspeed"]
    assert entry["version"] == version and entry["supported"] is fits
    assert entry["note"].startswith("supported: <0.20" if fits else "NOT SUPPORTED: <0.20")


def run_python(*arguments: str) -> str:
    """The standard output of a process of its own, in which DeepSpeed looks for an accelerator and logs about it."""
    env = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout


def test_as_a_module_the_standard_output_is_one_json_object_and_nothing_else() -> None:
    told = run_python("-m", "ds_sparse", "check", "configs/mstopk_zero1.json", "--json")
    assert json.loads(told)["config"] == "configs/mstopk_zero1.json"


def test_importing_the_command_line_imports_nothing_that_takes_long() -> None:
    told = run_python("-c", "import ds_sparse.cli, sys; print(*{name.split('.')[0] for name in sys.modules})")
    assert not {"torch", "numpy", "deepspeed", "pydantic", "rich"} & set(told.split())


def test_the_console_script_is_this_function() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="ds_sparse")
    assert script.load() is main, "run `make setup`"
