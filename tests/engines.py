"""Small DeepSpeed engines for the multirank tests."""

from __future__ import annotations

import collections
import contextlib
import copy
import logging
from typing import Any

import deepspeed
import torch
import torch._dynamo  # noqa: F401
import torch.distributed as dist

import ds_sparse
from ds_sparse.adapter import versions

with contextlib.suppress(ImportError):  # versions before 0.17 have none
    import deepspeed.runtime.zero.muon.original_muon  # noqa: F401  (compiles at import, see below)

# What an engine imports only when it is built is imported above, once, before ranks are forked: in every rank of every
# test it would cost seconds.

# Without it every first engine compiles, for a minute, an op that only inference uses.
deepspeed.ops.__compatible_ops__ = collections.defaultdict(bool)
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)

SIZES = (17, 33, 29, 5)  # odd, so that ZeRO's partitions cut parameters


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True, "betas": [0.9, 0.95]}},
    "AdamL2": {"type": "Adam", "params": {"torch_adam": True, "adam_w_mode": False, "weight_decay": 0.1}},
    "SGD": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    "SGD0": {"type": "SGD", "params": {"lr": 0.1}},
}


def build_model(seed: int = 0) -> torch.nn.Module:
    """A small network with odd sizes; the same on every rank."""
    torch.manual_seed(seed)
    layers: list[torch.nn.Module] = []
    for wide, narrow in zip(SIZES, SIZES[1:], strict=False):
        layers += [torch.nn.Linear(wide, narrow), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers[:-1])


def build_config(
    *,
    stage: int = 1,
    dtype: str = "fp32",
    optimizer: str = "AdamW",
    accumulation: int = 1,
    clipping: float = 0.0,
    section: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A DeepSpeed configuration; `section` is the `compressed_communication` section, absent when None."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clipping,
        "optimizer": copy.deepcopy(OPTIMIZERS[optimizer]),  # old versions of DeepSpeed take out what they have read
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 500},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    if section is not None:
        config["compressed_communication"] = section
    for key, value in more.items():
        config[key] = config.get(key, {}) | value if isinstance(value, dict) else value
    return config


def build_engine(
    config: dict[str, Any], *, ours: bool = True, model: torch.nn.Module | None = None, **kwargs: Any
) -> Any:
    """An engine by `ds_sparse.initialize`, or by DeepSpeed's own when not `ours`."""
    model = model or build_model()
    if ours:
        return ds_sparse.initialize(model=model, config=config, **kwargs)[0]
    with versions.no_graph():  # some versions cannot be built without it
        return deepspeed.initialize(model=model, config=config, **kwargs)[0]


def batch(step: int, rank: int | None = None, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a micro batch; every rank has its own."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(size, SIZES[0], generator=generator)
    return inputs, torch.sin(inputs[:, : SIZES[-1]] * 2.0) + 0.1 * torch.randn(size, SIZES[-1], generator=generator)


def backward(engine: Any, step: int) -> float:
    """Forward and backward of one micro batch; returns the loss."""
    inputs, targets = batch(step)
    dtype = next(engine.module.parameters()).dtype
    loss = torch.nn.functional.mse_loss(engine(inputs.to(dtype)).float(), targets)
    engine.backward(loss)
    return loss.item()


def train(engine: Any, steps: int, start: int = 0) -> list[torch.Tensor]:
    """`steps` optimizer steps; returns the flat fp32 parameters after each."""
    history = []
    micro = engine.gradient_accumulation_steps()
    for step in range(start, start + steps):
        for i in range(micro):
            backward(engine, step * micro + i)
            engine.step()
        history.append(flat_params(engine))
    return history


def replicas_equal(histories: list[list[torch.Tensor]]) -> bool:
    """Whether all ranks (one history each) had bitwise the same parameters after every step."""
    return all(torch.equal(a, b) for other in histories[1:] for a, b in zip(histories[0], other, strict=True))


def furthest(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """Largest difference of any parameter after any step."""
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


def flat_params(engine: Any) -> torch.Tensor:
    return torch.cat([p.detach().float().reshape(-1).clone() for p in engine.module.parameters()])
