"""The compiled decoders on damaged bytes, under AddressSanitizer and UndefinedBehaviorSanitizer: see fuzz_codec.cpp."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from .shim_launcher import compiler
from .test_sanitizers import runtime

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "ops" / "cpu"
FLAGS = ("-std=c++17", "-O1", "-g", "-ffp-contract=off", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")

pytestmark = pytest.mark.skipif(runtime() is None, reason="the compiler has no AddressSanitizer")


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("fuzz"))


def build(folder: Path, old: str = "", new: str = "") -> Path:
    """The fuzzer; with a piece of codec_indices.h replaced, when one is named."""
    source = (SOURCES / "codec_indices.h").read_text()
    assert old in source, "the source has changed, plant the bug anew"
    (folder / "codec_indices.h").write_text(source.replace(old, new) if old else source)
    command = [compiler() or "g++", *FLAGS, f"-I{folder}", f"-I{SOURCES}", str(HERE / "fuzz_codec.cpp")]
    done = subprocess.run([*command, "-o", str(folder / "fuzz")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "fuzz"


def run(fuzzer: Path, mutations: int, seed: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(fuzzer), str(mutations), str(seed)], capture_output=True, text=True, timeout=280)


def test_a_million_damaged_payloads_lead_no_decoder_astray(fuzzer: Path) -> None:
    done = run(fuzzer, 1_000_000, seed=1)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)  # shown by pytest -s: how many of each kind were reported
    counts = [tuple(map(int, re.findall(r"\d+", line))) for line in done.stdout.splitlines()]
    assert len(counts) == 4 and sum(map(sum, counts)) >= 1_000_000
    for reported, others, _ in counts:
        assert reported > 0 and others > 0, "each kind of damage is reported at times, and at times gives other indices"


BUGS = {
    "more set bits than k": ("if (i > s.k) return false;", "", "AddressSanitizer"),
    "eight bytes read at the end": ("bytes < 8 ? 0 : (8 * (bytes - 8) + 7) / width", "s.k", "AddressSanitizer"),
    "pads are not looked at": ("field_pad_is_zero(s, in) && ascends", "ascends", "gives the same bytes"),
    "order is not looked at": ("field_pad_is_zero(s, in) && ascends(indices, s.k, s.n)", "true", "ascending below n"),
    "n is not looked at": ("wrong = indices[k - 1] >= n", "wrong = (void(n), 0)", "ascending below n"),
    "fewer set bits than k": ("return i == s.k;", "return true;", "ascending below n|same bytes"),
}


FAST = (
    "more set bits than k",
    "fewer set bits than k",
)  # each is a build of its own: the others run with the slow ones


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in FAST else pytest.mark.slow) for x in BUGS])
def test_the_fuzzer_finds_planted_bugs(name: str, tmp_path: Path) -> None:
    old, new, message = BUGS[name]
    done = run(build(tmp_path, old, new), 20_000, seed=1)
    assert done.returncode != 0 and re.search(message, done.stderr), done.stderr[-500:]
