"""Starting an unchanged script: `deepspeed --module ds_sparse.run train.py ...`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ds_sparse import run


@pytest.mark.parametrize(
    "given, script, seen",
    [
        (["train.py"], "train.py", []),
        (["train.py", "--lr", "1"], "train.py", ["--lr", "1"]),
        # The launcher puts its argument in front of the script; the script sees it as it would without us.
        (["--local_rank=3", "train.py", "--lr", "1"], "train.py", ["--lr", "1", "--local_rank=3"]),
        # One that stands behind the script is the user's own, and stays where it is.
        (["train.py", "--local_rank=3", "--lr"], "train.py", ["--local_rank=3", "--lr"]),
    ],
)
def test_the_script_sees_its_own_arguments(given: list[str], script: str, seen: list[str]) -> None:
    assert run.split_arguments(given) == (script, seen)


@pytest.mark.parametrize("given", [[], ["--local_rank=0"], ["--deepspeed", "train.py"], ["--local_rank=0", "--x"]])
def test_a_call_without_a_script_says_how_to_call(given: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        run.split_arguments(given)
    assert run.USAGE in str(error.value)
    assert f"no script was named, got: {' '.join(given) or 'nothing'}" in str(error.value)


def test_the_script_runs_as_if_it_had_been_started_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_the_script.py").write_text("VALUE = 41\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import pathlib, sys, beside_the_script\n"
        "if __name__ == '__main__':\n"
        "    said = [str(beside_the_script.VALUE + 1), *sys.argv]\n"
        "    pathlib.Path(__file__).with_name('said').write_text('\\n'.join(said))\n"
    )
    installed: list[bool] = []
    monkeypatch.setattr(run, "install", lambda: installed.append(not (tmp_path / "said").exists()))
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # as `python -m` leaves it
    monkeypatch.setattr(sys, "argv", ["run.py", "--local_rank=1", str(script), "--lr", "1"])
    run.main()
    assert (tmp_path / "said").read_text().split("\n") == ["42", str(script), "--lr", "1", "--local_rank=1"]
    assert installed == [True]  # once, and before the script


def test_an_error_of_the_script_reaches_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("import sys; sys.exit(7)\n")
    monkeypatch.setattr(run, "install", lambda: None)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(sys, "argv", ["run.py", str(tmp_path / "train.py")])
    with pytest.raises(SystemExit) as stopped:
        run.main()
    assert stopped.value.code == 7


def test_it_runs_as_a_module() -> None:
    called = subprocess.run([sys.executable, "-m", "ds_sparse.run"], capture_output=True, text=True, timeout=60)
    assert called.returncode == 1
    assert called.stderr.startswith(run.USAGE)
