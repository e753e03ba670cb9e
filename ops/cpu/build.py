"""Compiles the CPU kernels once per machine, source and flags; every later start loads the cached library.

The sources use neither Python's nor torch's headers: any C++17 compiler does, and one library serves every Python and
torch version. Nothing here raises for want of a compiler: the answer is then None and the reason.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE_FOLDER = Path(__file__).parent
MAIN_SOURCE = "api.cpp"
# No contraction: a fused multiply-add rounds once where the specification rounds twice.
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=off", "-fvisibility=hidden", "-pthread")
COMPILE_SECONDS = 120


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

    1. look in the cache under a key of sources, flags, compiler and machine type
    2. compile into a temporary name in the same folder  3. rename: atomic, so that many ranks may start at once and
    each finds either no library or a whole one. When the cache cannot be written, a private temporary folder is used.
    """
    compiler = find_compiler()
    if compiler is None:
        return None, "no C++ compiler found (looked at $CXX, c++, g++, clang++)"
    flags = (*FLAGS, *extra_flags)
    key = _key(compiler, flags)
    folder = cache_folder()
    target = folder / f"libds_sparse_cpu-{key}.so"
    if target.exists():
        return target, f"cached at {target}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(prefix=f".{target.name}.", dir=folder)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="ds_sparse-"))
        target = folder / target.name
        handle, partial = tempfile.mkstemp(dir=folder)
    os.close(handle)
    failure = _compile([*compiler, *flags, str(SOURCE_FOLDER / MAIN_SOURCE), "-o", partial])
    if failure is not None:
        Path(partial).unlink(missing_ok=True)
        return None, failure
    os.chmod(partial, 0o755)
    os.replace(partial, target)
    return target, f"built with {shlex.join(compiler)} into {target}"


def _key(compiler: list[str], flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCE_FOLDER.glob("*.[ch]*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr((compiler, flags, platform.machine(), platform.libc_ver())).encode())
    return digest.hexdigest()[:20]


def _compile(command: list[str]) -> str | None:
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
