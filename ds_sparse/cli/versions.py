"""Which versions are installed, and whether DeepSpeed's is one that is supported."""

from __future__ import annotations

import platform
from importlib import metadata

from .command import JsonObject

CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy")  # each of them brings the module cupy


def versions() -> JsonObject:
    """For each package `version` (None when it is not installed), `supported` (None: any is) and a `note` on it.

    Packages are looked up, not imported.
    """
    from packaging.requirements import Requirement

    required = (Requirement(line) for line in metadata.requires("ds_sparse") or ())
    supported = next(requirement.specifier for requirement in required if requirement.name == "deepspeed")
    deepspeed = _installed("deepspeed")
    fits = deepspeed is not None and supported.contains(deepspeed, prereleases=True)
    return {
        "ds_sparse": _entry(_installed("ds_sparse")),
        "deepspeed": _entry(deepspeed, fits, f"{'supported' if fits else 'NOT SUPPORTED'}: {supported}"),
        "torch": _entry(_installed("torch")),
        "cupy": _entry(next(filter(None, map(_installed, CUPY)), None)),
        "Python": _entry(platform.python_version()),
    }


def _entry(version: str | None, supported: bool | None = None, note: str = "") -> JsonObject:
    return {"version": version, "supported": supported, "note": note}


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
