"""Fallback on engines: all ranks switch at one step, and back; what was held back is sent; a resumed run goes on so."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from ds_sparse import SlowerThanDenseError, fallback
from ds_sparse.config import CommunicationConfig
from ds_sparse.exchange import choose_exchange
from ds_sparse.methods import stream
from tests.engines import build_config, build_engine, replicas_equal, train
from tests.ranks import RankError, run_ranks

PACE = fallback.Pace(first=4, spacing=2, samples=2, wins=2, interval=4)
FROZEN = 3  # dense steps of sparse_momentum
TRIAL = PACE.spacing * PACE.samples
SECTIONS = {
    "gradient": ({"method": "sparse_gradient"}, "SGD", 0),
    "gradient, sums owned": ({"method": "sparse_gradient", "exchange": {"type": "reduce_scatter"}}, "SGD", 0),
    "momentum": ({"method": "sparse_momentum", "sparse_momentum": {"freeze_step": FROZEN}}, "AdamW", FROZEN),
}
COMMON = {"topology": {"ranks_per_node": 2}, "compressor": {"density": 0.05}, "exclude": {"min_numel": 20}}
Clock = Callable[[int], tuple[float, float]]  # rank -> (compressed, dense) seconds of a step


class Step(NamedTuple):
    """What one rank has after a step."""

    params: torch.Tensor
    fallback: int
    density: float
    residual_norm: float


def compression_is_slow(rank: int) -> tuple[float, float]:
    return 0.3, 0.1


def compression_is_fast(rank: int) -> tuple[float, float]:
    return 0.1, 0.3


def slow_for_the_last_rank(rank: int) -> tuple[float, float]:
    """So slow that the mean over ranks is, though the others see compression win."""
    return (9.0, 0.2) if rank == dist.get_world_size() - 1 else (0.1, 0.2)


def _engine(name: str, clock: Clock, **section: Any) -> Any:
    """On this rank: an engine whose steps take what `clock` says."""
    fallback.PACE, stream.choose_exchange = PACE, _choose_at_any_price
    own, optimizer, _ = SECTIONS[name]
    engine = build_engine(build_config(optimizer=optimizer, section=COMMON | own | section))
    _set_clock(engine, clock)
    return engine


def _choose_at_any_price(config: CommunicationConfig, *args: Any) -> Any:
    """The model is so small that some exchanges would not be chosen for it."""
    return choose_exchange(config.model_copy(update={"fallback": "off"}), *args)


def _set_clock(engine: Any, clock: Clock) -> None:
    state = engine.compressed_communication._level2.method.fallback

    class Fake:
        def __init__(self, device: torch.device) -> None:
            self._seconds = clock(dist.get_rank())[bool(state is not None and state.next_is_dense)]

        def stop(self) -> fallback.Seconds:
            return lambda: self._seconds

    stream.Stopwatch = Fake  # type: ignore[misc]


def _train(engine: Any, steps: int, start: int = 0) -> list[Step]:
    handle, history = engine.compressed_communication, []
    for step in range(start, start + steps):
        (params,) = train(engine, 1, start=step)
        last = handle.stats.last
        history.append(Step(params, last.fallback, last.density, handle.residual_norm()))
    return history


def _run(name: str, *phases: tuple[Clock, int]) -> tuple[list[Step], list[str]]:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("ds_sparse").addHandler(handler)
    engine, history = _engine(name, phases[0][0]), []
    for clock, steps in phases:
        _set_clock(engine, clock)
        history += _train(engine, steps, start=len(history))
    return history, [line for line in heard if "a step here" in line]


@pytest.mark.parametrize(
    ("name", "clock"), [*((name, compression_is_slow) for name in SECTIONS), ("gradient", slow_for_the_last_rank)]
)
def test_all_ranks_switch_at_one_step_and_back(name: str, clock: Clock) -> None:
    frozen = SECTIONS[name][2]
    dense_from = frozen + PACE.first + PACE.wins * TRIAL
    compressed_from = dense_from + PACE.interval + PACE.wins * TRIAL
    ranks = run_ranks(4, _run, name, (clock, dense_from), (compression_is_fast, compressed_from + 3 - dense_from))
    assert replicas_equal([[step.params for step in history] for history, _ in ranks])
    for history, _ in ranks:
        fallen_back = [step for step, one in enumerate(history) if one.fallback]
        assert fallen_back == list(range(dense_from, compressed_from))
        assert history[dense_from].density == 1.0 and history[dense_from].residual_norm == 0.0  # all was sent
        assert history[dense_from - 2].residual_norm > 0.0 and history[-1].residual_norm > 0.0
    slow, fast = ranks[0][1]  # two switches, each said once
    assert "everything is sent dense, and compression is tried again later" in slow
    assert "sent compressed again" in fast
    if clock is compression_is_slow:
        assert slow.startswith("compressed communication takes 300 ms a step here, dense 100 ms: ")
    assert not any(told for _, told in ranks[1:])


@pytest.mark.parametrize("name", SECTIONS)
def test_what_is_faster_never_switches(name: str) -> None:
    for history, told in run_ranks(4, _run, name, (compression_is_fast, 30)):
        assert not any(one.fallback for one in history) and not told
        trials = [step for step, one in enumerate(history) if one.density == 1.0]
        first = SECTIONS[name][2] + PACE.first
        assert trials[SECTIONS[name][2] :][: PACE.samples] == [first + 1, first + 3]  # the control: it was tried


def _slow_exchange() -> list[int]:
    engine = _engine("gradient", compression_is_slow)
    stream.Stopwatch = fallback.Stopwatch  # type: ignore[misc]
    for exchange in engine.compressed_communication._level2.method._stream._exchanges.values():
        exchange.mean_ = functools.partial(_slowly, exchange.mean_)
    return [step.fallback for step in _train(engine, PACE.first + PACE.wins * TRIAL + 2)]


def _slowly(mean: Callable[..., None], *args: Any) -> None:
    if dist.get_rank() == 0:  # the others wait for it
        time.sleep(0.2)  # some hundred times what such a small exchange takes
    mean(*args)


def test_a_slow_exchange_is_measured() -> None:
    """With the real clock; the tests above make times up."""
    assert all(steps[-2:] == [1, 1] and not any(steps[:-2]) for steps in run_ranks(4, _slow_exchange))


def _off() -> tuple[bool, list[float]]:
    engine = _engine("gradient", compression_is_slow, fallback="off")
    history = _train(engine, 20)
    return engine.compressed_communication._level2.method.fallback is None, [one.density for one in history]


def test_off_never_sends_dense() -> None:
    off, densities = run_ranks(4, _off)[0]
    assert off and max(densities) < 0.06  # 0.05 of a small shard, rounded up


def _error() -> None:
    _train(_engine("gradient", compression_is_slow, fallback="error"), 20)


def test_error_stops_the_run_on_all_ranks() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(4, _error)
    assert caught.value.types == dict.fromkeys(range(4), SlowerThanDenseError.__name__)
    assert (
        "'compressed_communication.fallback' is 'error' and compressed communication takes 300 ms a step here, dense "
        "100 ms. What to do: lower compressor.density, leave compression off, or set fallback to 'dense' or 'off'."
    ) in str(caught.value)


def _interrupted(name: str, stop: int, steps: int, folder: str) -> list[Step]:
    engine = _engine(name, compression_is_slow)
    _train(engine, stop)
    engine.save_checkpoint(folder)
    return _train(engine, steps - stop, start=stop)


def _resumed(name: str, stop: int, steps: int, folder: str) -> list[Step]:
    engine = _engine(name, compression_is_slow)
    engine.load_checkpoint(folder)
    return _train(engine, steps - stop, start=stop)


@pytest.mark.parametrize("past", [-PACE.wins * TRIAL - 1, 2])
@pytest.mark.parametrize("name", ["gradient, sums owned", "momentum"])
def test_a_resumed_run_goes_on_where_it_was(tmp_path: Path, name: str, past: int) -> None:
    """Stopped before the first trial, and after the switch. Bitwise, given the same times."""
    dense_from = SECTIONS[name][2] + PACE.first + PACE.wins * TRIAL
    stop, steps = dense_from + past, dense_from + 10
    whole = run_ranks(4, _interrupted, name, stop, steps, str(tmp_path))
    resumed = run_ranks(4, _resumed, name, stop, steps, str(tmp_path))
    for one, other in zip(whole, resumed, strict=True):
        assert [step.fallback for step in one] == [step.fallback for step in other]
        assert replicas_equal([[step.params for step in one], [step.params for step in other]])
    assert whole[0][-1].fallback
