"""Joins level 2 to one engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ..accounting import CommStats
from ..config import SECTION, CommunicationConfig, parse
from ..drift import ReplicaWatch
from ..errors import ConfigError, InactiveError
from ..level2 import Level2
from ..links import Link
from ..methods import Context
from ..ops import backend_info
from ..optim.two_phase_adam import TwoPhaseAdam
from ..shard import Exclusion
from ..topology import NodeTopology, build_topology
from . import versions
from .adam import ShardAdam
from .checkpoint import Checkpoints
from .checks import check_engine, check_exclusion, check_optimizer, traits_of
from .failures import name_failures
from .handle import CompressedCommunication
from .monitors import Monitors
from .parameters import Parameters
from .stage0 import Stage0Route
from .zero import ZeroRoute

logger = logging.getLogger("ds_sparse")


@dataclass(frozen=True)
class Preparation:
    """What is known before the engine builds its optimizer."""

    config: CommunicationConfig
    topology: NodeTopology


def prepare(engine: Any) -> Preparation | None:
    """Reads and checks the section; None when it is absent or switched off.

    Raises:
        ConfigError: the section is wrong, or the engine is of a kind that is not supported.
        RuntimeError: this version of DeepSpeed lacks something that is needed.
    """
    config = enabled_section(engine._config)
    if config is None:
        return None
    versions.require(engine, versions.ENGINE)
    check_engine(engine, config)
    ranks = dist.get_process_group_ranks(engine.seq_data_parallel_group)
    topology = build_topology(ranks, config.topology.ranks_per_node, config.topology.timeout_seconds)
    return Preparation(config, topology)


def enabled_section(settings: Any) -> CommunicationConfig | None:
    """The section in DeepSpeed's reading of the whole configuration; None when it is absent or switched off."""
    section = settings._param_dict.get(SECTION)
    config = None if section is None else parse(section)
    return config if config is not None and config.enabled else None


def attach(engine: Any, prepared: Preparation) -> None:
    """Puts level 2 into an engine whose ZeRO optimizer, if it has one, was built over the node's group."""
    config, topology, stats = prepared.config, prepared.topology, CommStats()
    names = topology.names
    node, peers = Link(topology.node_group, "intra", stats, names), Link(topology.peer_group, "inter", stats, names)
    exclusion, notes = Exclusion(config.exclude), versions.notes(engine)
    notes += check_optimizer(traits_of(engine.basic_optimizer), config) + check_exclusion(engine, exclusion, config)
    # 1. Level 1 says what this rank owns.
    sharded = int(engine.zero_optimization_stage()) > 0
    parameters, others = Parameters(engine, exclusion), _model_parallel_links(engine, stats)
    notes += parameters.notes(engine.module)
    route = ZeroRoute(engine, parameters) if sharded else Stage0Route(engine, parameters, node)
    placement = route.placement

    # 2. Level 2 works on it.
    def build() -> Level2:
        adam = None
        if config.method == "sparse_momentum":
            adam = ShardAdam(TwoPhaseAdam(engine.basic_optimizer), placement, node, peers, others)
        context = Context(config, placement.layout, placement.device, peers, node, adam, notes)
        return Level2(context, others, float(engine.gradient_clipping()), stats, lambda: engine.global_steps + 1)

    level2 = _on_all_ranks(build, notes)
    # 3. They are joined, watched, saved, and shown.
    route.install(level2)
    Checkpoints(engine, config, topology, level2, placement)
    handle = engine.compressed_communication = CompressedCommunication(config, topology, level2)
    replicas = ReplicaWatch(
        placement.read, placement.names, placement.device, node, peers, others, config.watch.interval
    )
    engine._take_model_step = _Watch(engine, handle, Monitors(engine, handle, level2), replicas, notes).step
    name_failures(engine, level2, node)
    if dist.get_rank() == 0:
        logger.info(banner(config, topology, level2))
    _tell(notes)


def _on_all_ranks(build: Callable[[], Level2], notes: list[str]) -> Level2:
    """Builds on all ranks or refuses on all: one that gave up alone would leave the others waiting for it.

    Shards differ, and with them what there is to say about them: `notes` becomes that of all ranks, each note once.
    """
    level2, refusal = None, ""
    try:
        level2 = build()
    except ConfigError as error:
        refusal = str(error)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (refusal, tuple(notes)))
    refusals = [its_refusal for its_refusal, _ in everyone if its_refusal]
    if level2 is None or refusals:
        raise ConfigError(refusals[0])
    notes[:] = dict.fromkeys(note for _, its_notes in everyone for note in its_notes)
    return level2


def _model_parallel_links(engine: Any, stats: CommStats) -> list[Link]:
    if engine.mp_world_size == 1:
        return []
    return [Link(engine.mpu.get_model_parallel_group(), "intra", stats)]


def banner(config: CommunicationConfig, topology: NodeTopology, level2: Level2) -> str:
    """One line that says what is on."""
    shape = f"{topology.num_nodes} nodes x {topology.ranks_per_node} ranks"
    if topology.num_nodes == 1:
        return f"compressed communication: {shape}: one node, nothing to compress"
    sent, dense = level2.planned_bytes, level2.dense_bytes
    what: str = config.method
    kernels = backend_info().get(level2.device.type, {"tier": "reference"})
    if config.method != "dense":
        what += f", {config.compressor.type} at density {config.compressor.final_density:g}"
    if config.method == "sparse_momentum":
        freeze_step = config.sparse_momentum.freeze_step
        what += f" after {freeze_step} dense steps" if freeze_step else " once the variance is stable"
    return (
        f"compressed communication: {shape}, {what}; across nodes {sent:,} bytes a step and rank, dense {dense:,} "
        f"(dense/wire {dense / max(sent, 1):.1f}x); kernels: {kernels['tier']}"
    )


def _tell(notes: list[str]) -> None:
    """Logs what there is to say, once, on rank 0."""
    for note in notes:
        if dist.get_rank() == 0:
            logger.warning("%s", note)
    notes.clear()


class _Watch:
    """Checks at every accumulation boundary that level 2 took part in it, writes the scalars, has replicas compared."""

    def __init__(
        self,
        engine: Any,
        handle: CompressedCommunication,
        monitors: Monitors,
        replicas: ReplicaWatch,
        notes: list[str],
    ) -> None:
        self._engine, self._handle, self._notes = engine, handle, notes
        self._monitors, self._replicas = monitors, replicas
        self._engine_step: Callable[..., None] = engine._take_model_step
        self._seen = 0

    def step(self, *args: Any, **kwargs: Any) -> None:
        self._monitors.before_step()
        self._engine_step(*args, **kwargs)
        boundaries = self._handle.stats.boundaries
        exchanged, self._seen = boundaries - self._seen, boundaries
        if exchanged != 1:
            raise InactiveError(
                f"'{SECTION}' is enabled, but at the accumulation boundary of step {self._engine.global_steps} there "
                f"were {exchanged} exchanges where 1 is due: {_cause(exchanged)}, or set '{SECTION}.enabled' to false."
            )
        _tell(self._notes)
        self._monitors.after_step()
        self._replicas.after_step(self._engine.global_steps)


def _cause(exchanged: int) -> str:
    if exchanged:
        return "backward ran more often than step. What to do: call engine.step() after each engine.backward()"
    return (
        "the gradients went another way. What to do: look for code that replaces the engine's or the optimizer's step"
    )


def require_section_off(engine: Any) -> None:
    """Refuses an engine that built no optimizer although the section is enabled: it would exchange nothing."""
    if enabled_section(engine._config) is not None:
        raise ConfigError(
            f"'{SECTION}.enabled' is true, but the engine has no optimizer; allowed is an engine that trains. What "
            f"to do: give an optimizer, or set '{SECTION}.enabled' to false."
        )
