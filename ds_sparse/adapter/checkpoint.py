"""`save_checkpoint` and `load_checkpoint` of an engine, with what level 2 keeps.

A tag's folder holds DeepSpeed's own files, which plain DeepSpeed can load, and beside them one of ours for each rank
(state_files.py). ZeRO's partitions are those of one node, as the nodes hold the same.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..config import CommunicationConfig
from ..errors import CheckpointError
from ..level2 import Level2
from ..topology import NodeTopology
from . import versions
from .adam import Placement
from .files import PendingFiles, by_rank, everywhere
from .reshard import Partition
from .state_files import Origin, SavedState, Shape, UnusableError, file_name, write_state

logger = logging.getLogger("ds_sparse")


class Checkpoints:
    """Wraps `save_checkpoint` and `load_checkpoint` of an engine.

    Args:
        level2: whose method is saved and loaded.
        placement: of what this rank owns.
    """

    def __init__(
        self,
        engine: Any,
        config: CommunicationConfig,
        topology: NodeTopology,
        level2: Level2,
        placement: Placement,
    ) -> None:
        self._engine, self._level2, self._placement = engine, level2, placement
        self._method_name = config.method
        self._shape = Shape(topology.num_nodes, topology.ranks_per_node)
        self._node, self._rank = next(
            (i, node.index(topology.rank)) for i, node in enumerate(topology.nodes) if topology.rank in node
        )
        self._mp_rank = versions.model_parallel_rank(engine)
        self._file_name = file_name(self._node, self._rank, self._mp_rank)
        self._stage = int(engine.zero_optimization_stage())
        self._sharded = self._stage > 0
        saves = self._node == 0 or engine.use_node_local_storage()
        if self._sharded:  # DeepSpeed compares ranks of different groups here, which is right for consecutive ones
            engine.save_zero_checkpoint = saves
        if self._stage == 3:  # and has the model in parts as well
            engine.save_non_zero_checkpoint = saves
        self._save: Callable[..., Any] = engine.save_checkpoint
        self._load: Callable[..., Any] = engine.load_checkpoint
        self._load_zero: Callable[..., Any] = engine._load_zero_checkpoint
        engine.save_checkpoint, engine.load_checkpoint = self.save, self.load
        engine._load_zero_checkpoint = self._load_zero_checkpoint

    def save(self, save_dir: str, *args: Any, **kwargs: Any) -> Any:
        """`engine.save_checkpoint`, with our file in the same folder; all files of all ranks, or none.

         1. Every rank writes all its files under temporary names, to the disk.
         2. When all ranks have, each moves its files into place.
         3. When all ranks have, `latest` is moved on.

        Raises:
            CheckpointError: on all ranks, when some rank could not write.
        """
        engine, asked = self._engine, _bind(self._save, save_dir, *args, **kwargs)
        tag = f"global_step{engine.global_steps}" if asked["tag"] is None else str(asked["tag"])
        files = PendingFiles(f"the checkpoint '{tag}' in '{save_dir}'")
        try:
            # 1. Ours first: a folder that cannot be made is found out before DeepSpeed waits for it.
            files.write(Path(save_dir) / tag / self._file_name, self._write_state)
            files.agree()
            with self._deepspeed_writes(files):
                result = self._save(**asked | {"tag": tag, "save_latest": False})
            # 2. and 3.
            files.commit()
            if asked["save_latest"] and engine.global_rank == 0:
                files.write(Path(save_dir) / "latest", lambda path: path.write_text(tag))
            files.commit()
        finally:
            files.discard()
        return result

    def _write_state(self, path: Path) -> None:
        origin = Origin(self._method_name, self._shape, self._engine.global_steps)
        write_state(path, origin, self._level2.method, self._level2.layout)

    @contextmanager
    def _deepspeed_writes(self, files: PendingFiles) -> Iterator[None]:
        """Has DeepSpeed write into `files`, for as many data-parallel ranks as there are partitions."""
        engine, writer = self._engine, self._engine.checkpoint_engine
        save, copy_script = writer.save, engine._copy_recovery_script

        def save_later(state_dict: Any, path: str) -> None:
            files.write(path, lambda partial: save(state_dict, str(partial)))

        def try_to_copy(folder: str) -> None:
            files.attempt(folder, lambda: copy_script(folder))

        partitions = self._shape.ranks if self._sharded else engine.seq_dp_world_size
        changes = {"_copy_recovery_script": try_to_copy, "seq_dp_world_size": partitions}
        with _temporarily(writer, save=save_later), _temporarily(engine, **changes):
            yield

    def load(self, load_dir: str, *args: Any, **kwargs: Any) -> Any:
        """`engine.load_checkpoint`; then our state, when the optimizer's state was loaded too.

        Raises:
            CheckpointError: another rank could not load; that one raises what it met.
        """
        asked = _bind(self._load, load_dir, *args, **kwargs)
        try:
            loaded = self._load(**asked)
        except Exception as error:
            by_rank(f"{type(error).__name__}: {error}")
            raise
        failures = by_rank("")
        if failures:
            raise CheckpointError(
                f"the checkpoint in '{load_dir}' was not loaded, {failures}. What to do: see to that rank, or load an "
                f"earlier one by its tag."
            )
        path = loaded[0]
        if path is not None and not asked["load_module_only"] and asked["load_optimizer_states"]:
            self._load_state(Path(path).parent)
        return loaded

    def _load_zero_checkpoint(self, load_dir: str, tag: str, *args: Any, **kwargs: Any) -> Any:
        """`engine._load_zero_checkpoint`, for any number of saved partitions."""
        engine = self._engine
        partitions = engine.loaded_checkpoint_dp_world_size
        changes: dict[str, Any] = {"seq_dp_world_size": partitions}  # what DeepSpeed compares it with
        if partitions != self._shape.ranks and not engine.load_universal_checkpoint():
            if self._stage == 3:
                raise CheckpointError(
                    f"the checkpoint has {partitions} partitions of ZeRO stage 3; allowed is {self._shape.ranks}, as "
                    f"many as there are ranks on a node now. What to do: start {partitions} ranks on each node."
                )
            model = engine.checkpoint_engine.load(engine._get_ckpt_name(load_dir, tag), map_location="cpu")
            changes["_get_all_zero_checkpoint_state_dicts"] = functools.partial(self._reshard, model["param_shapes"])
        with _temporarily(engine, **changes):
            return self._load_zero(load_dir, tag, *args, **kwargs)

    def _reshard(self, shapes: Any, names: list[str]) -> list[Any]:
        """Partitions for all ranks of this node; only that of this rank is there, as in DeepSpeed's own list."""
        read = self._engine.checkpoint_engine.load
        saved = (read(name, map_location="cpu")["optimizer_state_dict"] for name in names)  # one at a time
        partition = Partition(self._engine.optimizer, self._placement, shapes).fill(saved)
        return [partition if rank == self._rank else None for rank in range(self._shape.ranks)]

    def _load_state(self, folder: Path) -> None:
        """Fills the method's state from the files in `folder`, on all ranks or, with a warning, on none."""
        engine, method = self._engine, self._level2.method
        origin = Origin(self._method_name, self._shape, engine.global_steps)
        saved, obstacle = None, ""
        try:
            saved = SavedState(folder, self._node, self._mp_rank, origin)
        except UnusableError as error:
            obstacle = str(error)
        obstacles = [theirs for theirs in everywhere(obstacle) if theirs]
        if saved is None or obstacles:
            # All ranks start anew: their counters must agree.
            method.restart({"exchanged": engine.global_steps - engine.skipped_steps})
            _tell(f"the checkpoint has no residuals for this run, they start at zero: it {obstacles[0]}")
            return
        method.restart(saved.counters)
        dropped = sorted({key for keys in everywhere(saved.fill_(method, self._level2.layout)) for key in keys})
        if dropped:
            _tell(f"the checkpoint holds what this configuration does not use, it is dropped: {', '.join(dropped)}")
        if saved.shape != self._shape and dist.get_rank() == 0:
            logger.info("%s", _describe(saved.shape, self._shape, self._sharded))


def _describe(old: Shape, new: Shape, sharded: bool) -> str:
    done = [f"ZeRO's {old.ranks} partitions are cut into {new.ranks}"] if sharded and old.ranks != new.ranks else []
    if old.nodes != new.nodes:
        done.append("each node starts from the mean over the old nodes of what was not sent yet and of the momenta")
    else:
        done.append("each node keeps what it had not sent yet and its momenta")
    return f"checkpoint of {old} resumed on {new}: {'; '.join(done)}"


def _bind(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


@contextmanager
def _temporarily(target: Any, **attributes: Any) -> Iterator[None]:
    """Gives an object other attributes for the length of a block."""
    before = {name: vars(target)[name] for name in attributes if name in vars(target)}
    vars(target).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(target)[name]
        vars(target).update(before)


def _tell(warning: str) -> None:
    if dist.get_rank() == 0:
        logger.warning("%s", warning)
