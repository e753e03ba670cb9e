"""A non-finite gradient anywhere skips the step everywhere and changes nothing of ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engines import backward, build_config, build_engine, flat_params, replicas_equal, train
from tests.ranks import run_ranks

BAD_STEP = 4
SECTIONS = {
    "dense": ({"method": "dense"}, "AdamW"),
    "gradient": ({"method": "sparse_gradient", "error_feedback": {"momentum": 0.9}}, "SGD0"),
    "momentum": ({"method": "sparse_momentum", "sparse_momentum": {"freeze_step": 2}}, "AdamW"),
    "scatter": (
        {"method": "sparse_gradient", "fallback": "off", "exchange": {"type": "reduce_scatter", "value_dtype": "int8"}},
        "SGD",
    ),
}
PRECISIONS = [(0, "fp32"), (0, "bf16"), (1, "fp32"), (1, "bf16"), (1, "fp16"), (2, "fp32"), (2, "bf16"), (2, "fp16")]


def _engine(name: str, stage: int, dtype: str, **more: Any) -> Any:
    if dtype == "fp16":
        from deepspeed.accelerator import get_accelerator

        get_accelerator().is_fp16_supported = lambda: True  # the CPU can compute it, it only says that it cannot
        more.setdefault("fp16", {"initial_scale_power": 8})
    section, optimizer = SECTIONS[name]
    section = section | {
        "topology": {"ranks_per_node": 2}, "compressor": {"density": 0.05}, "exclude": {"min_numel": 20},
    }  # fmt: skip
    return build_engine(build_config(stage=stage, dtype=dtype, optimizer=optimizer, section=section, **more))


def _state(engine: Any) -> dict[str, torch.Tensor]:
    method = engine.compressed_communication._level2.method
    state = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    return state | {"params": flat_params(engine), "exchanged": torch.tensor(method.exchanged)}


def _one_bad_step(name: str, stage: int, dtype: str, poison: float) -> Any:
    engine = _engine(name, stage, dtype)
    history = train(engine, BAD_STEP)
    before = _state(engine)
    weight = engine.module[0].weight
    if dist.get_rank() == 3:
        handle = weight.register_hook(lambda grad: grad.fill_(poison))
    backward(engine, BAD_STEP)
    engine.step()
    if dist.get_rank() == 3:
        handle.remove()
    unchanged = {key: torch.equal(before[key], value) for key, value in _state(engine).items()}
    history += train(engine, 3, start=BAD_STEP + 1)
    stats = engine.compressed_communication.stats.total
    return history, unchanged, (stats.exchanges, stats.skipped, engine.skipped_steps)


def _without_the_bad_step(name: str, stage: int, dtype: str) -> Any:
    engine = _engine(name, stage, dtype, **({"fp16": {"loss_scale": 256}} if dtype == "fp16" else {}))
    return train(engine, BAD_STEP) + train(engine, 3, start=BAD_STEP + 1)


CASES = [(name, *precision) for name in SECTIONS if name != "scatter" for precision in PRECISIONS]
CASES += [("scatter", 0, "fp32"), ("scatter", 2, "fp16")]  # its state is kept where the others' is


@pytest.mark.parametrize(
    ("name", "stage", "dtype"),
    [pytest.param(*case, marks=pytest.mark.core if case[0] == "gradient" else ()) for case in CASES],
)
def test_skipped_everywhere_with_no_change_of_state(name, stage, dtype):
    poison = float("nan") if stage == 1 else float("inf")
    results = run_ranks(4, _one_bad_step, name, stage, dtype, poison)
    for _, unchanged, counts in results:
        assert all(unchanged.values()), unchanged
        assert counts == (BAD_STEP + 3, 1, 1)
    assert replicas_equal([history for history, _, _ in results])
    # Afterwards all goes on as if the batch had never been seen. (fp16: the loss scale has moved meanwhile, and with
    # it the rounding of small gradients, so there the comparison is with a scale that is a power of two away.)
    expected = run_ranks(4, _without_the_bad_step, name, stage, dtype)[0]
    if dtype == "fp16":
        assert (results[0][0][-1] - expected[-1]).abs().mean() < 2.0**-9  # one rounding of an fp16 parameter near 1
    else:
        assert torch.equal(results[0][0][-1], expected[-1])


def _scaled(stage: int, power: int) -> Any:
    engine = _engine("gradient", stage, "fp16", fp16={"loss_scale": 2**power})
    train(engine, 6)
    return engine.compressed_communication._level2.method.feedback.residual


@pytest.mark.parametrize("stage", [1, 2])
def test_residuals_do_not_depend_on_the_loss_scale(stage):
    small, large = (run_ranks(4, _scaled, stage, power)[0] for power in (8, 12))
    assert small.abs().max() > 1e-3
    # fp16 gradients are the same bits at both scales but for those that are denormal at the smaller one, which lose
    # at most 2^-24 / 2^8 each; the residual's selection then differs in nothing but ties.
    assert (small - large).abs().max() < 1e-4
