"""The `compressed_communication` section of `ds_config.json` as typed models.

This is the only place where values are checked. What can be decided from the section alone is decided here; what
depends on the engine (ZeRO stage, optimizer, number of nodes) is decided in `ds_sparse.adapter.checks`.

`python -m ds_sparse.config` prints the reference table of the documentation.
"""

from __future__ import annotations

import json
import reprlib
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, ValidationError

from .config_text import as_markdown, explain, shorten
from .config_types import Density, Number, Pattern, Settings
from .errors import ConfigError

SECTION = "compressed_communication"
DOCS = "docs/configuration.md"


class CompressorSettings(Settings):
    type: Literal["mstopk", "topk", "chunked_topk", "randomk", "identity"] = Field(
        "mstopk",
        description="Which entries of a shard are sent. `mstopk`: exact top-k from one streaming pass over a sampled "
        "threshold, or the paper's threshold search when `samplings` is given; `topk`: exact top-k, by that same pass; "
        "`chunked_topk`: as many entries out of every 4096; `randomk`: the same random entries on every node, so that "
        "no indices are sent; `identity`: all of them.",
    )
    density: Density = Field(0.01, description="Share of the entries that is sent, k/n in (0, 1].")
    samplings: Annotated[StrictInt, Field(ge=1, le=100)] | None = Field(
        None, description="`mstopk` only: use the paper's Algorithm 1 with this many threshold samplings (30 there)."
    )
    seed: Annotated[StrictInt, Field(ge=0, lt=2**31)] = Field(
        0, description="Seed of `randomk`, and of the random fill of `mstopk` with `samplings`."
    )

    @property
    def final_density(self) -> float:
        """The density in effect: `identity` takes everything."""
        return 1.0 if self.type == "identity" else self.density


class ErrorFeedbackSettings(Settings):
    enabled: StrictBool = Field(True, description="Keep what was not sent and add it to the next step.")
    decay: Annotated[Number, Field(gt=0.0, le=1.0)] = Field(
        1.0, description="Factor on the residual at every step; 1.0 loses nothing."
    )
    momentum: Annotated[Number, Field(ge=0.0, lt=1.0)] = Field(
        0.0,
        description="DGC's momentum correction with factor masking (`sparse_gradient` only). The optimizer's own "
        "momentum must then be 0.",
    )


class LinkSettings(Settings):
    gbit_per_second: Annotated[Number, Field(gt=0.0)] = Field(
        10.0, description="Bandwidth of a node's link to the other nodes; its ranks share it."
    )
    latency_us: Annotated[Number, Field(ge=0.0)] = Field(
        100.0, description="Time of a small message from node to node, in microseconds."
    )


class ExchangeSettings(Settings):
    type: Literal["cheapest", "all_gather", "reduce_scatter", "dense"] = Field(
        "cheapest",
        description="How payloads become a mean. `all_gather`: every peer gets every payload (HiTopKComm), at a cost "
        "that grows with the nodes; `reduce_scatter`: each peer sums a range of the indices and passes on the largest "
        "sums, at a cost that does not; `dense`: payloads are expanded and all-reduced; `cheapest`: whichever is "
        "fastest by the cost model for this density, number of nodes and `link`.",
    )
    value_dtype: Literal["fp32", "bf16", "fp16", "int8", "int4", "int2"] = Field(
        "fp32",
        description="Type of the values on the wire. Integers share a scale in blocks of 128. What rounding loses is "
        "kept by error feedback.",
    )
    index_encoding: Literal["smallest", "int32", "elias_fano", "bitmap", "chunk12"] = Field(
        "smallest",
        description="How indices become bytes; `smallest` decides by formula from the density; `chunk12` is for "
        "compressor `chunked_topk` only.",
    )
    chunks: Annotated[StrictInt, Field(ge=1, le=64)] = Field(
        1,
        description="`all_gather`: regions of a shard that are selected, sent and summed in turn, each while its "
        "neighbours are in another stage. Every region sends its own share of the entries.",
    )
    link: LinkSettings = Field(default_factory=LinkSettings)


class TopologySettings(Settings):
    ranks_per_node: Annotated[StrictInt, Field(ge=1)] | None = Field(
        None,
        description="Data-parallel ranks that form a node. Omitted: the launcher's environment and the host names "
        "tell. A number overrides them: 2 on one machine with 4 ranks makes 2 nodes of 2.",
    )
    timeout_seconds: Annotated[Number, Field(ge=1.0, le=1e7)] | None = Field(
        None,
        description="How long a collective waits for other ranks before it fails, also those of ZeRO inside a node "
        "(docs/faults.md). Omitted: as long as the default process group's.",
    )


class ScheduleSettings(Settings):
    dense_steps: Annotated[StrictInt, Field(ge=0)] = Field(
        0, description="`sparse_gradient`: optimizer steps at the start that are sent dense."
    )
    densities: tuple[Density, ...] = Field(
        (), strict=False, description="Densities to pass through before `compressor.density`, each not above the last."
    )
    steps_per_density: Annotated[StrictInt, Field(ge=0)] = Field(
        0, description="Optimizer steps at each of `densities`; at least 1 when `densities` is given."
    )


class ExcludeSettings(Settings):
    min_numel: Annotated[StrictInt, Field(ge=0)] = Field(
        1024, description="Parameters with fewer elements are sent dense, in the same message."
    )
    patterns: tuple[Pattern, ...] = Field(
        (), strict=False, description="Regular expressions; a parameter whose name one of them finds is sent dense."
    )


class SparseMomentumSettings(Settings):
    freeze_step: Annotated[StrictInt, Field(ge=1)] | None = Field(
        None,
        description="Optimizer step after which the variance is frozen and compression starts. Omitted: detected "
        "from the stability of the variance, not before step 2/(1 - beta2): 40 at beta2 0.95, 2000 at 0.999.",
    )
    beta1: Annotated[Number, Field(ge=0.0, lt=1.0)] = Field(
        0.5,
        description="Decay of the first moment once it is sent compressed. Error feedback delays what it sends and so "
        "is a momentum of its own: the optimizer's usual 0.9 on top of it is too much (docs/fidelity.md).",
    )
    stability: Annotated[Number, Field(gt=0.0, lt=1.0)] = Field(
        0.96,
        description="Detection: freeze when the L1 norm of the variance changes by less than this factor over "
        "1/(1 - beta2) steps, once the learning rate has stopped rising.",
    )


class MonitorSettings(Settings):
    enabled: StrictBool = Field(True, description="Write `Comm/*` scalars through DeepSpeed's monitors, if any is on.")
    interval: Annotated[StrictInt, Field(ge=1)] = Field(1, description="Optimizer steps between two writes.")
    histogram_interval: Annotated[StrictInt, Field(ge=0)] = Field(
        0, description="Optimizer steps between two writes of each parameter's density and threshold; 0: never."
    )


class WatchSettings(Settings):
    interval: Annotated[StrictInt, Field(ge=0)] = Field(
        1000,
        description="Optimizer steps between two comparisons of the parameters of all nodes, by a checksum; 0 for "
        "none. Nodes that differ stop the run (docs/faults.md).",
    )


class CommunicationConfig(Settings):
    """The whole section."""

    enabled: StrictBool = Field(True, description="`false`: DeepSpeed runs exactly as without this package.")
    method: Literal["dense", "sparse_gradient", "sparse_momentum"] = Field(
        "sparse_momentum",
        description="What crosses nodes. `dense`: everything (the control); `sparse_gradient`: the gradient, for SGD "
        "with momentum; `sparse_momentum`: for Adam and AdamW, a dense phase, then frozen variance and compressed "
        "momentum.",
    )
    compressor: CompressorSettings = Field(default_factory=CompressorSettings)
    error_feedback: ErrorFeedbackSettings = Field(default_factory=ErrorFeedbackSettings)
    exchange: ExchangeSettings = Field(default_factory=ExchangeSettings)
    topology: TopologySettings = Field(default_factory=TopologySettings)
    schedule: ScheduleSettings = Field(default_factory=ScheduleSettings)
    exclude: ExcludeSettings = Field(default_factory=ExcludeSettings)
    sparse_momentum: SparseMomentumSettings = Field(default_factory=SparseMomentumSettings)
    sharded_update: StrictBool | None = Field(
        None,
        description="`true`: the optimizer's step is sharded inside the node by ZeRO stage 1 or 2; `false`: every "
        "rank updates everything (stage 0). Omitted: as the ZeRO stage says.",
    )
    fallback: Literal["dense", "off", "error"] = Field(
        "dense",
        description="When dense communication is faster, at start by the cost model and then as measured: `dense` "
        "sends dense and says so, `off` compresses all the same, `error` stops. Only `off` is bitwise reproducible.",
    )
    monitor: MonitorSettings = Field(default_factory=MonitorSettings)
    watch: WatchSettings = Field(default_factory=WatchSettings)


def parse(section: Any) -> CommunicationConfig:
    """Validates the section as read from JSON.

    Raises:
        ConfigError: names the first offending key as the user wrote it, its value, what is allowed, what to do.
    """
    if not isinstance(section, dict):
        raise ConfigError(f"'{SECTION}' is {reprlib.repr(section)}; it must be an object of settings, see {DOCS}.")
    _refuse_everywhere(section)
    try:
        config = CommunicationConfig.model_validate(section)
    except ValidationError as error:
        raise ConfigError(explain(error.errors()[0], section, CommunicationConfig, SECTION, DOCS)) from None
    _check_combinations(config)
    return config


def _refuse_everywhere(section: dict[str, Any]) -> None:
    """Refuses, at any depth, the word 'auto' and keys that are no ASCII text, which pydantic would not name."""
    pending: list[tuple[str, Any]] = [(SECTION, section)]
    while pending:  # no recursion: what users nest by mistake may be deeper than the stack
        path, value = pending.pop()
        if value == "auto":
            raise ConfigError(
                f"'{shorten(path)}' is 'auto', which this section does not know: Hugging Face Trainer and Accelerate "
                f"reject every 'auto' that they cannot fill in themselves. Leave the key out to have its default."
            )
        for key in value if isinstance(value, dict) else ():
            if not (isinstance(key, str) and key.isascii()):
                raise ConfigError(f"'{shorten(path)}' has {ascii(key)}, which is not a known key. See {DOCS}.")
        children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        pending += reversed([(f"{path}.{key}", child) for key, child in children])


def _check_combinations(config: CommunicationConfig) -> None:
    """What single fields cannot say: settings that contradict each other."""
    compressor, feedback = config.compressor, config.error_feedback
    _refuse(
        compressor.samplings is not None and compressor.type != "mstopk",
        "compressor.samplings", compressor.samplings, f"with type 'mstopk' only, not '{compressor.type}'",
        "leave it out, or set compressor.type to 'mstopk'",
    )
    _check_exchange(config)
    _refuse(
        feedback.momentum > 0 and config.method != "sparse_gradient",
        "error_feedback.momentum", feedback.momentum, f"0 with method '{config.method}'",
        "leave it out, or use method 'sparse_gradient' with SGD",
    )
    _refuse(
        feedback.momentum > 0 and not feedback.enabled,
        "error_feedback.momentum", feedback.momentum, "0 when error_feedback.enabled is false",
        "leave it out, or enable error feedback",
    )
    _check_schedule(config)
    _refuse(
        config.method != "sparse_momentum" and "sparse_momentum" in config.model_fields_set,
        "sparse_momentum", config.sparse_momentum.model_dump(exclude_unset=True),
        f"left out with method '{config.method}'", "remove the block, or set method to 'sparse_momentum'",
    )


def _check_exchange(config: CommunicationConfig) -> None:
    compressor, exchange = config.compressor, config.exchange
    _refuse(
        compressor.type == "identity" and exchange.type in ("all_gather", "reduce_scatter"),
        "exchange.type", exchange.type, "'dense' or 'cheapest' with compressor.type 'identity', which has no indices",
        "leave exchange.type out",
    )
    _refuse(
        exchange.index_encoding == "chunk12"
        and (compressor.type != "chunked_topk" or exchange.type != "all_gather"),
        "exchange.index_encoding", "chunk12",
        "with compressor.type 'chunked_topk' and exchange.type 'all_gather' only, where every 4096 entries send as "
        "many", "leave index_encoding out",
    )
    _refuse(
        exchange.type == "dense" and exchange.value_dtype != "fp32",
        "exchange.value_dtype", exchange.value_dtype, "'fp32' with exchange.type 'dense', which sends sums",
        "leave one of the two out",
    )
    _refuse(
        exchange.chunks > 1 and exchange.type in ("reduce_scatter", "dense"),
        "exchange.chunks", exchange.chunks, f"1 with exchange.type '{exchange.type}'",
        "set exchange.type to 'all_gather', or leave chunks out",
    )


def _check_schedule(config: CommunicationConfig) -> None:
    compressor, schedule = config.compressor, config.schedule
    _refuse(
        bool(schedule.densities) and compressor.type == "identity",
        "schedule.densities", list(schedule.densities), "[] with compressor.type 'identity', which takes everything",
        "leave it out",
    )
    densities = (*schedule.densities, compressor.density)
    _refuse(
        any(later > earlier for earlier, later in zip(densities, densities[1:], strict=False)),
        "schedule.densities", list(schedule.densities),
        f"a falling list that ends at or above compressor.density ({compressor.density})", "sort it from high to low",
    )
    _refuse(
        bool(schedule.densities) != (schedule.steps_per_density > 0),
        "schedule.steps_per_density", schedule.steps_per_density,
        "at least 1 together with schedule.densities, and 0 without", "give both, or neither",
    )
    _refuse(
        schedule.dense_steps > 0 and config.method == "sparse_momentum",
        "schedule.dense_steps", schedule.dense_steps, "0 with method 'sparse_momentum', which has its own dense phase",
        "use sparse_momentum.freeze_step",
    )


def _refuse(condition: bool, key: str, value: Any, allowed: str, remedy: str) -> None:
    if condition:
        setting = f"'{SECTION}.{key}' is {json.dumps(value)}"
        raise ConfigError(f"{setting}; allowed is {allowed}. What to do: {remedy}. See {DOCS}.")


def reference_table() -> str:
    """The configuration reference in Markdown."""
    return as_markdown(CommunicationConfig, SECTION)


if __name__ == "__main__":
    print(reference_table(), end="")
