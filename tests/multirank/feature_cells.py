"""How a cell of the table of features is tried out, on each rank.

It is trained three times on two nodes: by DeepSpeed alone, by method `dense`, and by a sparse method.
"""

from __future__ import annotations

import contextlib
import gc
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch

from tests.engines import build_config, build_engine, flat_params
from tests.multirank.features import COLUMNS, FEATURES, Feature

with contextlib.suppress(ImportError):  # versions before 0.18 have none; before the fork, as in tests/engines.py
    import deepspeed.runtime.superoffload.superoffload_stage3  # noqa: F401

STEPS, SPARSE_STEPS = 3, 10


def section(method: str, feature: Feature) -> dict[str, Any]:
    """Of a method, `dense` or `sparse`, for that feature."""
    common = {"topology": {"ranks_per_node": feature.per_node}, "exclude": {"min_numel": 20}}
    if method == "dense":
        return common | {"method": "dense"}
    sparse = common | {"compressor": {"density": 0.2}, "exchange": {"type": "all_gather"}, "fallback": "off"}
    if feature.optimizer == "AdamW":
        return sparse | {"method": "sparse_momentum", "sparse_momentum": {"freeze_step": 3}}
    return sparse | {"method": "sparse_gradient"}


def configuration(feature: Feature, column: str, dtype: str, method: str | None) -> dict[str, Any]:
    config = build_config(
        dtype=dtype, optimizer=feature.optimizer,
        section=None if method is None else section(method, feature),
    )  # fmt: skip
    if dtype == "fp16":
        config["fp16"] |= {"initial_scale_power": 8}
    for overlay in (COLUMNS[column], feature.settings):
        for key, value in overlay.items():
            if key not in ("fp16", "bf16") or key == dtype:
                config[key] = config.get(key, {}) | value if isinstance(value, dict) else value
    return config


@dataclass
class Run:
    """What a rank saw of one training run."""

    params: list[torch.Tensor] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: int = 0
    exchanges: int = 0
    balance: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    refusal: str = ""


def train_once(feature: Feature, column: str, dtype: str, method: str | None) -> Run:
    run = Run()
    try:
        model = feature.model()
        config = configuration(feature, column, dtype, method)
        engine = build_engine(config, ours=method is not None, model=model, **feature.kwargs(model))
        if method is not None:
            watch_balance(engine, run)
        run.params.append(whole_params(engine))
        for step in range(SPARSE_STEPS if method == "sparse" else STEPS):
            run.losses.append(feature.step(engine, step))
            run.params.append(whole_params(engine))
            norm = engine.get_global_grad_norm()
            run.norms.append(None if norm is None else float(norm))
            run.scales.append(loss_scale(engine))
        run.skipped = engine.skipped_steps
        if method is not None:
            run.exchanges = engine.compressed_communication.stats.total.exchanges
    except Exception as error:
        run.refusal = f"{type(error).__name__}: {error}".split("\n")[0]
    return run


def whole_params(engine: Any) -> torch.Tensor:
    """All parameters, also where stage 3 has taken them apart."""
    params = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(params, enabled=engine.zero_optimization_stage() == 3):
        return flat_params(engine)


def loss_scale(engine: Any) -> float:
    scaler = engine.torch_autocast_z0_gradscaler or getattr(engine.optimizer, "torch_autocast_gradscaler", None)
    return float(scaler.get_scale() if scaler is not None else getattr(engine.optimizer, "loss_scale", 1.0))


def watch_balance(engine: Any, run: Run) -> None:
    """Notes, at each exchange, what this node put in less what it kept, and what came out."""
    method = engine.compressed_communication._level2.method
    exchange = method.exchange_

    def kept() -> torch.Tensor:
        return torch.zeros(0) if method.feedback is None else method.feedback.residual.double()

    def watched(shard: torch.Tensor) -> float:
        before, momentum = kept(), getattr(method, "momentum", None)
        added = shard.double()
        if momentum is not None:  # the momentum is what is sent
            decay = method._decay
            added = momentum.double() * decay + added * (1 - decay)
        added[: before.numel()] += before
        density = exchange(shard)
        added[: before.numel()] -= kept()
        run.balance.append((added, shard.double()))
        return density

    method.exchange_ = watched


def train_cell(feature: Feature, column: str, dtype: str) -> dict[str, Run]:
    """All three runs of a cell, on one rank."""
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # the CPU computes it but says no
    runs = {"stock": train_once(feature, column, dtype, None)}
    for method in ("dense", "sparse"):
        runs[method] = train_once(feature, column, dtype, method)
    return runs


def train_cells(cells: list[tuple[int, str, str]]) -> list[dict[str, Run]]:
    """Of `(index in FEATURES, column, dtype)`, on one rank."""
    gc.freeze()  # what was there before the fork: DeepSpeed collects garbage for each engine of stage 3
    return [train_cell(FEATURES[index], column, dtype) for index, column, dtype in cells]
