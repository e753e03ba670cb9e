"""What level 2 keeps, saved and loaded with the engine's checkpoints.

Each rank writes one safetensors file into the tag's folder, before DeepSpeed writes its own and moves `latest` on. It
holds the tensors of the method (residual, velocity, momentum); its metadata holds the counters and the layout of the
shard, so that a file is never read into another layout.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from ..level2 import Level2
from ..topology import NodeTopology

logger = logging.getLogger("ds_sparse")


class Checkpoints:
    """Wraps `save_checkpoint` and `load_checkpoint` of an engine.

    Args:
        level2: whose method is saved and loaded.
    """

    def __init__(self, engine: Any, topology: NodeTopology, level2: Level2) -> None:
        self._engine, self._level2 = engine, level2
        self._signature = _signature(topology, level2)
        self._save: Callable[..., Any] = engine.save_checkpoint
        self._load: Callable[..., Any] = engine.load_checkpoint
        engine.save_checkpoint, engine.load_checkpoint = self.save, self.load

    def save(self, save_dir: str, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """`engine.save_checkpoint`, with our file in the same folder."""
        tag = f"global_step{self._engine.global_steps}" if tag is None else str(tag)
        method = self._level2.method
        metadata = {"signature": self._signature, "counters": json.dumps(method.counters())}
        target = _file(Path(save_dir) / tag)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        tensors = {name: tensor.contiguous() for name, tensor in method.state_dict().items()}
        save_file(tensors, partial, metadata=metadata)
        os.replace(partial, target)  # a crash leaves the whole file or none
        return self._save(save_dir, tag, *args, **kwargs)

    def load(self, load_dir: str, *args: Any, **kwargs: Any) -> Any:
        """`engine.load_checkpoint`; then our state, when the optimizer's state was loaded too."""
        asked = inspect.signature(self._load).bind(load_dir, *args, **kwargs)
        asked.apply_defaults()
        loaded = self._load(load_dir, *args, **kwargs)
        path = loaded[0]
        if path is not None and not asked.arguments["load_module_only"] and asked.arguments["load_optimizer_states"]:
            self._load_state(_file(Path(path).parent))
        return loaded

    def _load_state(self, file: Path) -> None:
        tensors, counters, obstacle = self._read(file)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, obstacle)  # all ranks load, or all start anew: their counters must agree
        obstacle = next(filter(None, everyone), "")
        if obstacle:
            tensors, counters = {}, {"exchanged": self._engine.global_steps - self._engine.skipped_steps}
            if dist.get_rank() == 0:
                logger.warning("the checkpoint has no residuals for this run, they start at zero: %s", obstacle)
        self._level2.method.load_state(tensors, counters)

    def _read(self, file: Path) -> tuple[dict[str, torch.Tensor], dict[str, float], str]:
        """Tensors, counters, and what speaks against using them (empty when nothing does)."""
        if not file.exists():
            return {}, {}, "it was written without compressed communication"
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
            if metadata["signature"] != self._signature:
                return {}, {}, "it was written by other nodes, ranks or parameters"
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            return tensors, json.loads(metadata["counters"]), ""


def _file(folder: Path) -> Path:
    return folder / f"ds_sparse_rank_{dist.get_rank():05d}.safetensors"


def _signature(topology: NodeTopology, level2: Level2) -> str:
    """Names the layout: which rank of which nodes, and which entries of which parameters stand where."""
    layout = [(s.name, s.numel, s.start) for s in level2.layout.segments]
    return hashlib.sha256(repr((topology.nodes, topology.rank, layout)).encode()).hexdigest()
