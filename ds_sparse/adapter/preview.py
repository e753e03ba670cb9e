"""What `ds_config.json` alone tells about the engine that will be built from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

from ..config import SECTION, CommunicationConfig
from ..errors import ConfigError
from . import versions
from .checks import check_optimizer, check_settings, traits_in

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class Preview:
    """The engine as far as the configuration describes it, and advice for the user."""

    zero_stage: int
    precision: str
    optimizer: str | None  # None: the script brings its own
    notes: list[str]


def preview(whole: dict[str, Any], config: CommunicationConfig) -> Preview:
    """Checks the section against the rest of the configuration, as an engine would, without building one.

    What depends on the model, the launcher or an optimizer made by the script is left to the engine.

    Args:
        whole: `ds_config.json` as read.
        config: its section.

    Raises:
        ConfigError: DeepSpeed refuses its own settings, or they do not go with the section.
    """
    settings, left_out = _settings(whole)
    check_settings(settings, config)
    optimizer = traits_in(settings)
    notes = check_optimizer(optimizer, config) if optimizer else []
    if left_out:
        notes.append(f"not checked, for something else fills in each 'auto' at start: {', '.join(left_out)}")
    return Preview(
        int(settings.zero_config.stage), _precision(settings), optimizer.kind if optimizer else None, notes
    )


def _settings(whole: dict[str, Any]) -> tuple[Any, list[str]]:
    """DeepSpeed's reading, and the keys whose value is 'auto'.

    Batch sizes are replaced: whether they fit together depends on the number of ranks, which only the launcher knows.
    """
    left_out: list[str] = []
    known = _without_auto({key: value for key, value in whole.items() if key != SECTION}, "", left_out)
    for key in BATCH_KEYS:
        known.pop(key, None)
    try:
        return DeepSpeedConfig(known | {BATCH_KEYS[1]: 1}), left_out
    except (AssertionError, DeepSpeedConfigError, TypeError, ValueError) as error:
        raise ConfigError(f"outside '{SECTION}', DeepSpeed refuses the configuration: {error}") from error


def _without_auto(block: dict[str, Any], path: str, left_out: list[str]) -> dict[str, Any]:
    kept = {}
    for key, value in block.items():
        if value == "auto":
            left_out.append(path + key)
        else:
            kept[key] = _without_auto(value, f"{path}{key}.", left_out) if isinstance(value, dict) else value
    return kept


def _precision(settings: Any) -> str:
    if versions.autocast_enabled(settings):
        return f"torch autocast, {str(versions.autocast_dtype(settings)).removeprefix('torch.')}"
    return "fp16" if versions.fp16_enabled(settings) else "bf16" if versions.bf16_enabled(settings) else "fp32"
