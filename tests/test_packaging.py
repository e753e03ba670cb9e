"""What holds of the tree as a whole: every install brings all of it, imports run one way, files stay small.

Installs go offline and without dependencies into temporary folders, from a copy of the files that git would commit, so
that neither leftovers of earlier builds nor the editable install under test can stand in for what is missing.
"""

from __future__ import annotations

import ast
import configparser
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_sparse._version import __version__
from ds_sparse.ops.cpu import build

ROOT = Path(__file__).resolve().parents[1]
NO_COMPILER = {"CXX": "/nowhere/c++"}
INSTALLED_AS = {"ds_sparse": "ds_sparse", "ops": "ds_sparse/ops"}
MAX_FILE_LINES = 320
MAX_FUNCTION_LINES = 45

# Rooms of ds_sparse from the top down. A room imports from its own layer and from those below; within a layer, rooms
# must not import each other in a circle.
LAYERS = (
    {"adapter"},
    {"report"},
    {"agreement", "drift", "level2", "monitor", "planner"},
    {"methods"},
    {"optim", "schedule"},
    {"exchange"},
    {"fallback", "feedback"},
    {"compressors", "costs"},
    {"accounting", "data", "links", "ops", "payload", "shard", "topology", "wire"},
    {"config", "config_text", "config_types", "errors", "_version"},
)
ENTRY_POINTS = {"", "__main__", "cli", "run"}  # "" is ds_sparse/__init__.py; these may reach any room


# ---- files ------------------------------------------------------------------------------------------------------


def committed_files(*folders: str) -> list[Path]:
    """Files of the working tree that git tracks or would add, relative to the root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *folders]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sorted({Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file()})


def installed_path(path: Path) -> str:
    """Where a file of the package lies once installed: `ops/cpu/x.cpp` -> `ds_sparse/ops/cpu/x.cpp`."""
    return "/".join([INSTALLED_AS[path.parts[0]], *path.parts[1:]])


PACKAGE_FILES = committed_files(*INSTALLED_AS)
MODULES = [path for path in PACKAGE_FILES if path.suffix == ".py"]
MEASURED = MODULES + [path for path in committed_files("examples") if path.suffix == ".py"]


def test_setup_cfg_lists_every_package_folder() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    listed = config["options"]["packages"].split()
    assert sorted(listed) == sorted({installed_path(path.parent).replace("/", ".") for path in MODULES})


def test_version_is_the_installed_one() -> None:
    assert importlib.metadata.version("ds_sparse") == __version__, "run `make setup` after a change of version"


# ---- installs ---------------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A fresh copy of the tree, with nothing in it that git would not commit."""
    target = tmp_path / "checkout"
    for path in committed_files():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, target / path)
    return target


def run_python(python: str | Path, *args: str | Path, cwd: Path, path: Path | None = None, **more: str) -> str:
    """Standard output of a Python that sees `path` before its own packages, and neither the tree nor coverage.

    `more` is added to its environment.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(("COVERAGE_", "PYTHON"))}
    env |= more
    if path is not None:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run([str(python), *map(str, args)], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.args} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def pip(*args: str | Path, cwd: Path, python: str | Path = sys.executable, **more: str) -> None:
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    run_python(python, "-m", "pip", "--disable-pip-version-check", *args[:1], *offline, *args[1:], cwd=cwd, **more)


def imported_from(python: str | Path, cwd: Path, path: Path | None = None) -> list[Path]:
    """Where ds_sparse and ds_sparse.ops are imported from."""
    code = "import ds_sparse, ds_sparse.ops; print(ds_sparse.__file__, ds_sparse.ops.__file__, sep='\\n')"
    return [Path(line) for line in run_python(python, "-c", code, cwd=cwd, path=path).splitlines()[-2:]]


def cpu_tier_without_a_compiler(cwd: Path, path: Path) -> str:
    """The tier that an installed package has on a machine where nothing can be compiled, and the reason for it."""
    code = "from ds_sparse.ops import backend_info; print(*backend_info()['cpu'].values(), sep=': ')"
    return run_python(sys.executable, "-c", code, cwd=cwd, path=path, DS_SPARSE_CACHE=str(cwd), **NO_COMPILER)


def expected_files() -> set[str]:
    """What an install must contain: every file of the packages but their notes."""
    return {installed_path(path) for path in PACKAGE_FILES if path.suffix != ".md"}


def test_wheel_holds_the_packages_and_nothing_else(checkout: Path, tmp_path: Path) -> None:
    dist, site, elsewhere = (tmp_path / name for name in ("dist", "site", "elsewhere"))
    elsewhere.mkdir()
    pip("wheel", "--wheel-dir", dist, ".", cwd=checkout)
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
    info = f"ds_sparse-{__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"ds_sparse", info}
    compiled = {name for name in names if name.endswith(".so")}
    assert {name for name in names if not name.startswith(info)} - compiled == expected_files()
    assert "ds_sparse/py.typed" in names
    assert any(name.startswith(info) and name.endswith("/LICENSE") for name in names)

    pip("install", "--target", site, wheel, cwd=elsewhere)
    expected = [site / "ds_sparse" / "__init__.py", site / "ds_sparse" / "ops" / "__init__.py"]
    assert imported_from(sys.executable, cwd=elsewhere, path=site) == expected

    if build.find_compiler() is not None:
        (library,) = compiled
        assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
        tier = cpu_tier_without_a_compiler(elsewhere, site)
        assert tier.startswith("native (") and tier.endswith(f"shipped as {site / library}\n")


def test_install_from_the_folder_without_a_compiler(checkout: Path, tmp_path: Path) -> None:
    """It takes a wheel without the library, which any machine could use; NumPy then serves, and says why."""
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip("install", "--target", site, ".", cwd=checkout, **NO_COMPILER)
    assert "Tag: py3-none-any\n" in (site / f"ds_sparse-{__version__}.dist-info" / "WHEEL").read_text(encoding="utf-8")
    assert cpu_tier_without_a_compiler(elsewhere, site).startswith("numpy: no C++ compiler found")
    missing = {name for name in expected_files() if not (site / name).is_file()}
    assert not missing
    expected = [site / "ds_sparse" / "__init__.py", site / "ds_sparse" / "ops" / "__init__.py"]
    assert imported_from(sys.executable, cwd=elsewhere, path=site) == expected


def test_editable_install_uses_the_folder(checkout: Path, tmp_path: Path) -> None:
    """In a new environment that sees the packages of this one, but not what its .pth files add."""
    environment, elsewhere = tmp_path / "venv", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run_python(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    (site,) = environment.glob("lib/*/site-packages")
    ours = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    (site / "packages_of_the_tests.pth").write_text("\n".join(ours) + "\n", encoding="utf-8")

    python = environment / "bin" / "python"
    pip("install", "--editable", ".", cwd=checkout, python=python)
    expected = [checkout / "ds_sparse" / "__init__.py", checkout / "ops" / "__init__.py"]
    assert imported_from(python, cwd=elsewhere) == expected


# ---- imports ----------------------------------------------------------------------------------------------------


def imports_in(source: str, path: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything that a module imports, at any depth and under any condition."""
    package = installed_path(path.parent).split("/")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = base + (node.module.split(".") if node.module else [])
            yield from ((node.lineno, ".".join([*origin, alias.name])) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


ROOMS = {Path(installed_path(path)).with_suffix("").parts[1] for path in MODULES} - {"__init__"}


def room_of(dotted: str) -> str:
    """Room that a name of ds_sparse belongs to; "" for the package itself and the names it offers."""
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else ""


def room_of_file(path: Path) -> str:
    return room_of(installed_path(path.with_suffix("")).replace("/", "."))


def layer_of(room: str) -> int:
    """Index in LAYERS. Entry points stand above all of them: nothing else may import them."""
    if room in ENTRY_POINTS:
        return -1
    found = [index for index, rooms in enumerate(LAYERS) if room in rooms]
    assert found, f"ds_sparse.{room} has no place in LAYERS: put it in the layer that its imports call for"
    return found[0]


def import_faults(source: str, path: Path) -> list[str]:
    """Imports that break the rules, as `file:line: what`."""
    room = room_of_file(path)
    faults = []
    for line, dotted in imports_in(source, path):
        top = dotted.split(".")[0]
        if top == "deepspeed" and room != "adapter":
            faults.append(f"{path}:{line}: imports {dotted}; only ds_sparse/adapter/ may")
        elif top == "ops":
            faults.append(f"{path}:{line}: imports {dotted}; its name is ds_sparse.{dotted}")
        elif top == "ds_sparse" and room_of(dotted) != room and layer_of(room_of(dotted)) < layer_of(room):
            faults.append(f"{path}:{line}: imports {dotted}, which is above ds_sparse.{room}")
    return faults


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_run_one_way(path: Path) -> None:
    faults = import_faults((ROOT / path).read_text(encoding="utf-8"), path)
    assert not faults, "\n".join(faults)


def test_rooms_do_not_import_each_other_in_a_circle() -> None:
    edges: dict[str, set[str]] = {}
    for path in MODULES:
        room, source = room_of_file(path), (ROOT / path).read_text(encoding="utf-8")
        if room not in ENTRY_POINTS:
            imported = {room_of(dotted) for _, dotted in imports_in(source, path) if dotted.startswith("ds_sparse")}
            edges.setdefault(room, set()).update(imported - ENTRY_POINTS - {room})
    while leaves := {room for room in edges if not edges[room] & edges.keys()}:
        edges = {room: imported for room, imported in edges.items() if room not in leaves}
    assert not edges, f"these import each other in a circle, or import those that do: {edges}"


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("ds_sparse/topology.py", "import deepspeed"),
        ("ds_sparse/methods/x.py", "def f():\n    from deepspeed.runtime import engine"),
        ("ds_sparse/__init__.py", "import importlib\nimportlib.import_module('deepspeed.comm')"),
        ("ops/cuda/x.py", "try:\n    import deepspeed.comm as dist\nexcept ImportError:\n    pass"),
        ("ds_sparse/topology.py", "from ds_sparse.adapter import attach"),
        ("ds_sparse/compressors/x.py", "from ..exchange import dense"),
        ("ds_sparse/compressors/__init__.py", "from .. import feedback"),
        ("ds_sparse/wire.py", "from . import ConfigError"),
        ("ops/__init__.py", "from ..methods.base import Method"),
        ("ds_sparse/compressors/x.py", "import ops"),
    ],
)
def test_a_planted_import_is_found(path: str, source: str) -> None:
    assert len(import_faults(source, Path(path))) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("ds_sparse/adapter/x.py", "import deepspeed\nfrom ..methods import y\nfrom . import z"),
        ("ds_sparse/__init__.py", "def initialize():\n    from .adapter import attach"),
        ("ds_sparse/feedback.py", "from .compressors.base import Compressor\nfrom .errors import ConfigError"),
        ("ops/cuda/x.py", "from .. import types\nimport torch\nimport deepspeed_like_name"),
    ],
)
def test_an_allowed_import_is_allowed(path: str, source: str) -> None:
    assert import_faults(source, Path(path)) == []


# ---- sizes ------------------------------------------------------------------------------------------------------


def size_faults(source: str, path: Path) -> list[str]:
    lines = len(source.splitlines())
    faults = [f"{path}: {lines} lines, {MAX_FILE_LINES} are allowed"] if lines > MAX_FILE_LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                faults.append(f"{path}:{node.lineno}: {node.name} has {lines} lines, {MAX_FUNCTION_LINES} are allowed")
    return faults


@pytest.mark.parametrize("path", MEASURED, ids=str)
def test_files_and_functions_stay_small(path: Path) -> None:
    faults = size_faults((ROOT / path).read_text(encoding="utf-8"), path)
    assert not faults, "\n".join(faults)


def test_what_is_too_long_is_found() -> None:
    function = "async def f():\n" + "    await g()\n" * MAX_FUNCTION_LINES
    assert len(size_faults(function, Path("x.py"))) == 1
    assert len(size_faults("x = 1\n" * (MAX_FILE_LINES + 1), Path("x.py"))) == 1
    assert size_faults("x = 1\n" * MAX_FILE_LINES, Path("x.py")) == []
