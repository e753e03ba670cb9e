"""The CPU tiers: every instruction set, thread count and guess equals the reference bit for bit."""

from __future__ import annotations

import multiprocessing
import os
import platform
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from ops import tiers
from ops.cpu import build, chunked_numpy, native
from ops.types import Accumulation, Tier

from .battery import Case, assert_like_reference, chunked, ks_for, mstopk, topk
from .distributions import MAKERS

ROOT = Path(__file__).parents[2]
FORMS = {
    "fp32": {},
    "bf16, decay": {"grad": "bf16", "decay": 0.9},
    "fp16": {"grad": "fp16"},
    "momentum": {"momentum": 0.9},
}
PATH, WHY = build.library()
needs_library = pytest.mark.skipif(PATH is None, reason=f"no compiled kernels: {WHY}")


def library() -> native.NativeTier:
    assert PATH is not None
    return native.load(PATH)


def tiers_under_test() -> dict[str, Tier]:
    """NumPy, each instruction set, and for the widest several thread counts and misleading guesses."""
    found: dict[str, Tier] = {"numpy": chunked_numpy}
    if PATH is None:
        return found
    base = library()
    for isa in base.variants:
        found[isa] = native.NativeTier(base.library, isa, threads=1)
    for threads in (2, 5):
        found[f"{isa}, {threads} threads"] = native.NativeTier(base.library, isa, threads)
    for guess in (0, 0x3F800000, 0x7F800001, 0x7FFFFFFF):
        found[f"{isa}, guess {guess:#x}"] = native.NativeTier(base.library, isa, 2, guess)
    return found


TIERS = tiers_under_test()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("tier", TIERS)
def test_topk_equals_the_reference(tier: str, name: str, form: str) -> None:
    for n in (1, 7, 1000, 20_011):
        for k in ks_for(n):
            assert_like_reference(TIERS[tier], Case(name, n, **FORMS[form]), topk(k))


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("tier", TIERS)
def test_mstopk_and_chunked_equal_the_reference(tier: str, name: str) -> None:
    for n in (1, 1000, 20_011):
        case = Case(name, n, momentum=0.9)
        for k in ks_for(n):
            for samplings in (1, 10, 30, 31):
                assert_like_reference(TIERS[tier], case, mstopk(k, samplings, seed=k))
        for k_c, chunk in ((0, 64), (1, 1), (40, 100), (41, 4096), (4096, 4096)):
            assert_like_reference(TIERS[tier], case, chunked(k_c, chunk))


@pytest.mark.parametrize("name", ["gaussian", "ascending", "block_at_the_end", "constant"])
def test_long_vectors_that_overflow_the_candidate_buffer(name: str) -> None:
    """Buffers hold 2 k + 64 Ki entries: only longer vectors are pruned in flight."""
    for tier in TIERS.values():
        assert_like_reference(tier, Case(name, 300_001, momentum=0.5), topk(3000))


@needs_library
def test_guesses_change_the_work_and_not_the_result() -> None:
    """The control for the guesses above: they do steer the search."""
    case, work = Case("gaussian", 50_000), {}  # short enough that nothing is pruned
    for guess in (None, 0):
        tier = native.NativeTier(library().library, library().isa, 1, guess)
        work[guess] = int(assert_like_reference(tier, case, topk(1000)).candidates)
    assert work[None] < 3000 < work[0]


@needs_library
def test_unaligned_views_are_served() -> None:
    residual, grad = torch.randn(10_001), torch.randn(10_001)
    expected = library().topk_(residual[1:].clone(), Accumulation(grad[1:].clone()), 100)
    got = library().topk_(residual[1:], Accumulation(grad[1:]), 100)
    assert torch.equal(got.indices, expected.indices) and torch.equal(got.values, expected.values)


@needs_library
def test_calls_from_many_threads_at_once() -> None:
    case, tier, failures = Case("gaussian", 50_000), native.NativeTier(library().library, library().isa, 3), []

    def work() -> None:
        try:
            for k in (1, 50, 5000):
                assert_like_reference(tier, case, topk(k))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def _in_a_child() -> None:
    torch.set_num_threads(1)  # OpenMP's threads, torch's own, do not survive a fork
    assert_like_reference(native.NativeTier(library().library, library().isa, 3), Case("gaussian", 50_000), topk(500))


@needs_library
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_gets_threads_of_its_own() -> None:
    assert_like_reference(native.NativeTier(library().library, library().isa, 3), Case("gaussian", 50_000), topk(500))
    child = multiprocessing.get_context("fork").Process(target=_in_a_child)
    child.start()
    child.join(60)
    assert child.exitcode == 0, "None: it hangs; else it failed"


@needs_library
def test_torchs_thread_count_is_followed() -> None:
    tier, before = library(), torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        assert tier._threads_for(1 << 30) == 4
        assert tier._threads_for(1000) == 1, "a short vector is not worth waking anybody"
    finally:
        torch.set_num_threads(before)


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


SELECT = "import ops, torch; s = ops.ef_topk_(torch.arange(9.0), torch.ones(9), 2); print(s.indices.tolist(), "


def test_without_a_compiler_numpy_serves(tmp_path: Path) -> None:
    out = run_python(
        SELECT + "ops.backend_info()['cpu'])", CXX="/nowhere/c++", DS_SPARSE_CACHE=str(tmp_path), DS_SPARSE_CPU_TIER=""
    )
    assert out.startswith("[7, 8] {'tier': 'numpy'") and "no C++ compiler found" in out


def test_a_compiler_that_fails_is_named_and_numpy_serves(tmp_path: Path) -> None:
    out = run_python(SELECT + "ops.backend_info()['cpu'])", CXX="false", DS_SPARSE_CACHE=str(tmp_path))
    assert out.startswith("[7, 8] {'tier': 'numpy'") and "failed with status 1" in out


def test_a_library_that_cannot_be_loaded_is_named_and_numpy_serves(tmp_path: Path) -> None:
    fake = tmp_path / "c++"
    fake.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho no library > "$2"\n')
    fake.chmod(0o755)
    out = run_python(SELECT + "ops.backend_info()['cpu'])", CXX=str(fake), DS_SPARSE_CACHE=str(tmp_path / "cache"))
    assert out.startswith("[7, 8] {'tier': 'numpy'") and "cannot be loaded" in out


@needs_library
def test_an_unwritable_cache_is_no_obstacle(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    out = run_python(SELECT + "ops.backend_info()['cpu']['tier'])", DS_SPARSE_CACHE=str(blocked / "cache"))
    assert out.startswith("[7, 8] native")


@needs_library
def test_many_ranks_starting_at_once_share_one_build(tmp_path: Path) -> None:
    environment = {**os.environ, "DS_SPARSE_CACHE": str(tmp_path)}
    code = SELECT + "ops.backend_info()['cpu']['tier'])"
    ranks = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for rank in ranks:
        assert rank.communicate(timeout=120)[0].startswith("[7, 8] native")
    assert len(list(tmp_path.glob("*.so"))) == 1 and len(list(tmp_path.iterdir())) == 1


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The library of an install: beside its sources, in a copy of them. There is no compiler."""
    sources = tmp_path / "cpu"
    shutil.copytree(build.SOURCE_FOLDER, sources, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    monkeypatch.setattr(build, "SOURCE_FOLDER", sources)
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.setenv("DS_SPARSE_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copy(PATH or "", build.shipped_path(sources)))


@needs_library
def test_the_shipped_library_serves_first(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.library() == (shipped, f"shipped as {shipped}")
    monkeypatch.delenv("CXX")
    assert build.library() == (shipped, f"shipped as {shipped}"), "with a compiler too"


@needs_library
def test_a_shipped_library_of_other_sources_is_not_used(shipped: Path) -> None:
    with (shipped.parent / "common.h").open("a", encoding="utf-8") as header:
        header.write("// another version\n")
    assert build.library() == (None, build.NO_COMPILER)


@needs_library
@pytest.mark.parametrize("other", ["ppc64le", "aarch64"])
def test_a_shipped_library_of_another_machine_is_not_used(
    shipped: Path, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: other)
    assert build.library() == (None, build.NO_COMPILER)


@needs_library
def test_where_the_shipped_library_cannot_be_loaded_it_is_compiled(
    shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the C library is older than the one it was linked with."""
    shipped.write_text("no library")
    assert build.library() == (None, build.NO_COMPILER)
    monkeypatch.delenv("CXX")
    path, how = build.library()
    assert path is not None and how.startswith("built with")
    assert native.load(path).variants == library().variants


@needs_library
def test_a_compiler_without_a_static_run_time_ships_a_library_too(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "c++"
    monkeypatch.delenv("CXX")
    real = shlex.join(build.find_compiler() or [])
    refuse = 'case "$*" in *static*) echo "error: cannot find -lstdc++" >&2; exit 1;; esac'
    compiler.write_text(f'#!/bin/sh\n{refuse}\nexec {real} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    shipped.unlink()
    assert build.ship(shipped.parent) is None
    assert native.load(shipped).variants == library().variants


@pytest.mark.parametrize("tier", tiers.CPU_TIERS)
def test_a_tier_can_be_forced(tier: str) -> None:
    if tier == "native" and PATH is None:
        pytest.skip(WHY)
    out = run_python("import ops; print(ops.backend_info()['cpu']['tier'])", DS_SPARSE_CPU_TIER=tier)
    assert out.startswith(tier)


def test_an_unknown_forced_tier_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_SPARSE_CPU_TIER", "fast")
    with pytest.raises(ValueError, match="must be one of native, numpy, reference, got 'fast'"):
        tiers.cpu_choice.__wrapped__()
