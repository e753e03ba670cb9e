"""Which tier serves which tensor, and what is said when none does."""

from __future__ import annotations

import builtins
import importlib

import pytest
import torch

import ops
from ops import tiers
from ops.cuda import cupy_launcher


def test_backend_info_names_a_tier_and_a_reason_for_each_device() -> None:
    info = ops.backend_info()
    assert set(info) == {"cpu", "cuda"}
    for entry in info.values():
        assert entry["tier"] and entry["reason"]


@pytest.mark.parametrize(("cuda", "extra"), [("12.8", "cuda12"), ("13.0", "cuda13")])
def test_without_cupy_the_extra_to_install_is_named(monkeypatch: pytest.MonkeyPatch, cuda: str, extra: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.version, "cuda", cuda)

    def no_cupy(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(cupy_launcher, "import_module", no_cupy)
    choice = tiers.cuda_choice.__wrapped__()
    assert choice.tier is None
    assert f"pip install ds_sparse[{extra}]" in choice.reason and "No module named 'cupy'" in choice.reason


def test_a_gpu_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (6, 1))
    assert "at least 7.0, got 6.1" in tiers.cuda_choice.__wrapped__().reason


def test_cuda_tensors_without_a_tier_raise_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnCuda:
        device = torch.device("cuda", 0)

    monkeypatch.setattr(tiers, "cuda_choice", lambda: tiers.Choice(None, "none", "pip install it"))
    with pytest.raises(RuntimeError, match="pip install it"):
        tiers.tier_of(OnCuda())  # type: ignore[arg-type]


def test_importing_the_kernels_imports_no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lazily loaded: a CPU run must not pay for, or fail over, CuPy."""
    real = builtins.__import__

    def guarded(name: str, *args: object, **kwargs: object) -> object:
        assert not name.startswith("cupy"), "cupy was imported"
        return real(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", guarded)
    importlib.reload(ops.api)
    ops.ef_topk_(torch.ones(8), torch.ones(8), 2)


def test_the_installed_package_is_this_folder() -> None:
    """``ds_sparse.ops`` (installed) and ``ops`` (plain checkout) are the same files."""
    installed = pytest.importorskip("ds_sparse.ops")
    assert installed.__all__ == ops.__all__
