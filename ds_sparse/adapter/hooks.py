"""The hooks on DeepSpeed's engine class.

The class is hooked, not `deepspeed.initialize`: a script, or a library, may have imported that name earlier.

    __init__                before it: see that all ranks start alike; after it: attach to the finished engine
    _configure_optimizer    around it: ZeRO finds the node's group where it looks for the data-parallel group
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.engine import BFLOAT16, ZERO_OPTIMIZATION, DeepSpeedEngine

from ..agreement import Agreement, Start, describe_model
from ..errors import ConfigError
from . import versions
from .attach import Preparation, attach, enabled_section, prepare, require_section_off

_PREPARED = "_ds_sparse_prepared"
_originals: dict[str, Callable[..., None]] = {}  # what stood on the class before our hooks; empty while they are off


def install() -> None:
    """From now on every DeepSpeed engine honours the `compressed_communication` section. Calling it again is free."""
    if _originals:
        return
    _make_log_visible()
    hooked = {"__init__": _hooked_init, "_configure_optimizer": _hooked_configure_optimizer}
    versions.require(DeepSpeedEngine, hooked)
    for name, hook in hooked.items():
        _originals[name] = getattr(DeepSpeedEngine, name)
        setattr(DeepSpeedEngine, name, hook(_originals[name]))


def uninstall() -> None:
    """Takes the hooks off again; engines that were built meanwhile keep what they have."""
    for name, original in _originals.items():
        setattr(DeepSpeedEngine, name, original)
    _originals.clear()


@contextmanager
def installed() -> Iterator[None]:
    """Hooks for the length of a block, unless they were there before."""
    was_installed = bool(_originals)
    install()
    try:
        yield
    finally:
        if not was_installed:
            uninstall()


def initialize(*args: Any, **kwargs: Any) -> Any:
    """`deepspeed.initialize`, for an engine that honours the section: same arguments, same return values."""
    with installed():
        return deepspeed.initialize(*args, **kwargs)


def _hooked_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(engine: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        _require_agreement(engine, original, args, kwargs)
        original(engine, *args, **kwargs)
        prepared: Preparation | None = engine.__dict__.pop(_PREPARED, None)
        if prepared is not None:
            attach(engine, prepared)
        else:
            require_section_off(engine)

    return __init__


def _require_agreement(engine: Any, original: Callable[..., None], args: Any, kwargs: Any) -> None:
    """Compares with the other ranks what the engine is to be built from."""
    given = inspect.signature(original).bind(engine, *args, **kwargs).arguments
    config, refusal = None, ""
    try:
        config = enabled_section(given["config_class"])
    except ConfigError as error:
        refusal = str(error)
    mpu: Any = given.get("mpu")
    # The groups of sequence parallelism come as an mpu without a data-parallel group: all ranks hold the same model.
    data_parallel = getattr(mpu, "get_data_parallel_group", None)
    group = data_parallel() if data_parallel is not None else None
    start = Start(config, refusal, describe_model(given["model"]), dist.get_process_group_ranks(group))
    Agreement(start, None if config is None else config.topology.timeout_seconds).require()


def _hooked_configure_optimizer(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _configure_optimizer(engine: Any, *args: Any, **kwargs: Any) -> None:
        prepared = prepare(engine)
        if prepared is None:
            return original(engine, *args, **kwargs)
        engine.__dict__[_PREPARED] = prepared
        everybody = engine.seq_data_parallel_group
        engine.seq_data_parallel_group = prepared.topology.node_group
        if int(engine.zero_optimization_stage()) == 3:
            for param in engine.module.parameters():  # where stage 3 looks
                param.ds_zero_partition_process_group = prepared.topology.node_group
        engine._do_optimizer_sanity_check = functools.partial(_prefer_zero, engine._do_optimizer_sanity_check)
        try:
            with versions.no_graph():
                return original(engine, *args, **kwargs)
        finally:
            engine.seq_data_parallel_group = everybody
            del engine._do_optimizer_sanity_check

    return _configure_optimizer


def _prefer_zero(wrapper_for: Callable[[Any], str | None], optimizer: Any) -> str | None:
    """The wrapper that DeepSpeed would choose, but ZeRO's own in place of `BF16_Optimizer`.

    DeepSpeed chooses that one for bf16 at stage 1 with gradients accumulated in fp32. It holds whole gradients where
    ZeRO holds this rank's partition, and computes the same: both reduce in the communication data type, and step on
    fp32 masters.
    """
    wrapper = wrapper_for(optimizer)
    return ZERO_OPTIMIZATION if wrapper == BFLOAT16 else wrapper


def _make_log_visible() -> None:
    """Shows the banner where the program has not set up logging itself."""
    logger = logging.getLogger("ds_sparse")
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[ds_sparse] %(message)s"))
        logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
