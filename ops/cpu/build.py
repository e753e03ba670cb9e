"""Where the compiled CPU kernels come from: shipped in the wheel, kept from an earlier start, or compiled now.

The sources use neither Python's nor torch's headers: any C++17 compiler does, and one library serves every Python and
torch version. Nothing here raises for want of a compiler: the answer is then None and the reason.

setup.py runs this file by its path, where neither torch nor NumPy need be installed: it imports the standard library
alone.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE_FOLDER = Path(__file__).parent
# No contraction: a fused multiply-add rounds once where the specification rounds twice.
FLAGS = ("-O2", "-std=c++17", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden", "-pthread")
# For a library that travels: the C++ run time inside, and kept to itself, lest it meet the one that torch brought.
STATIC_RUNTIME = ("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL")
COMPILE_SECONDS = 120
NO_COMPILER = "no C++ compiler found (looked at $CXX, c++, g++, clang++)"


def cache_folder() -> Path:
    """$DS_SPARSE_CACHE, else ds_sparse in the user's cache folder ($XDG_CACHE_HOME or ~/.cache)."""
    if own := os.environ.get("DS_SPARSE_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "ds_sparse"


def find_compiler() -> list[str] | None:
    """$CXX when set (and nothing else then), else the first of c++, g++, clang++ on the path."""
    if chosen := os.environ.get("CXX"):
        command = shlex.split(chosen)
        return command if command and shutil.which(command[0]) else None
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return [found]
    return None


def library(extra_flags: tuple[str, ...] = ()) -> tuple[Path | None, str]:
    """The compiled library, building it if needed, and how it was had; or None and why there is none.

    1. the one that the package was installed with, when it is of these sources and loads on this machine
    2. look in the cache under a key of sources, flags, compiler and machine
    3. compile in a temporary folder beside it and rename: atomic, so that many ranks may start at once and each finds
    either no library or a whole one. When the cache cannot be written, a private temporary folder is used.
    """
    shipped = shipped_path(SOURCE_FOLDER)
    if not extra_flags and _loads(shipped):
        return shipped, f"shipped as {shipped}"
    compiler = find_compiler()
    if compiler is None:
        return None, NO_COMPILER
    key = _key(*compiler, *extra_flags, *platform.libc_ver())
    folder = cache_folder()
    target = folder / f"libds_sparse_cpu-{key}.so"
    if target.exists():
        return target, f"cached at {target}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        work = tempfile.TemporaryDirectory(prefix=f".{target.stem}.", dir=folder)
    except OSError:
        target = Path(tempfile.mkdtemp(prefix="ds_sparse-")) / target.name
        work = tempfile.TemporaryDirectory(dir=target.parent)
    with work:
        partial = Path(work.name) / target.name
        failure = _build(compiler, extra_flags, partial)
        if failure is not None:
            return None, failure
        os.replace(partial, target)
    return target, f"built with {shlex.join(compiler)} into {target}"


def shipped_path(folder: Path) -> Path:
    """Where the library for the sources in `folder` lies when an install brings it. A stale one has another name."""
    return folder / f"libds_sparse_cpu-{_key()}.so"


def ship(folder: Path) -> str | None:
    """Compiles the library that a wheel brings into `folder`; None when it worked, else why there is none."""
    compiler = find_compiler()
    if compiler is None:
        return NO_COMPILER
    with tempfile.TemporaryDirectory() as work:
        partial = Path(work) / "library.so"
        failure = _build(compiler, STATIC_RUNTIME, partial)
        if failure is not None:  # some systems have the static run time in a package of its own
            failure = _build(compiler, (), partial)
        if failure is None:
            shutil.copy(partial, shipped_path(folder))
    return failure


def _key(*parts: str) -> str:
    """A name for what is compiled: sources, flags, kind of machine, and `parts`."""
    digest = hashlib.sha256()
    for path in sorted(SOURCE_FOLDER.glob("*.[ch]*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr((FLAGS, platform.system(), platform.machine(), parts)).encode())
    return digest.hexdigest()[:20]


def _loads(path: Path) -> bool:
    """Whether it is there and can be loaded: a library of another system may want a newer C library than this one."""
    try:
        ctypes.CDLL(os.fspath(path))
    except OSError:
        return False
    return True


def _build(compiler: list[str], extra_flags: tuple[str, ...], target: Path) -> str | None:
    """Compiles every source by itself, side by side, and links; None when it worked, else one line that says why not.

    What lies between is left beside `target`.
    """
    command = [*compiler, *FLAGS, *extra_flags]
    objects = {source: str(target.with_name(f"{source.stem}.o")) for source in sorted(SOURCE_FOLDER.glob("*.cpp"))}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        failures = pool.map(_run, ([*command, "-c", str(source), "-o", made] for source, made in objects.items()))
        failure = next(filter(None, failures), None)
    return failure or _run([*command, "-shared", *objects.values(), "-o", str(target)])


def _run(command: list[str]) -> str | None:
    """None when it worked, else one line that says why not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the compiler could not be run: {error}"
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        first_error = next((line for line in lines if "error" in line), lines[-1])
        return f"{command[0]} failed with status {done.returncode}: {first_error}"
    return None
