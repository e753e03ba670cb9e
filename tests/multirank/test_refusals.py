"""What cannot be run is refused before the first step, in words that help."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_sparse import ConfigError
from ds_sparse.adapter.checks import OptimizerTraits, check_optimizer
from ds_sparse.config import parse
from tests.engines import batch, build_config, build_engine, build_model, train
from tests.ranks import RankError, run_ranks

MOMENTUM = {"method": "sparse_momentum", "exclude": {"min_numel": 20}}
GRADIENT = {"method": "sparse_gradient", "exclude": {"min_numel": 20}}


def _build(config: dict[str, Any], make_model: Any = build_model) -> None:
    build_engine(config, model=make_model())


def refusal(world: int, config: dict[str, Any], *args: Any) -> str:
    """The message of the ConfigError that every rank must raise."""
    with pytest.raises(RankError) as caught:
        run_ranks(world, _build, config, *args)
    assert set(caught.value.types.values()) == {"ConfigError"}, caught.value
    assert len(caught.value.types) == world
    return str(caught.value)


def _sparse_embedding_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Embedding(10, 17, sparse=True), build_model())


CASES = {
    "misspelt key": (build_config(section={"compresor": {}}), "'compressed_communication.compresor'", "'compressor'"),
    "density 2": (
        build_config(section={"compressor": {"density": 2}}), "compressor.density' is 2", "a number in (0, 1]",
    ),
    "world not divisible": (
        build_config(section=MOMENTUM | {"topology": {"ranks_per_node": 3}}),
        "topology.ranks_per_node' is 3", "a divisor of the 2 data-parallel ranks",
    ),
    "sharded at stage 0": (
        build_config(stage=0, section=MOMENTUM | {"sharded_update": True}),
        "sharded_update' is true, ZeRO stage is 0", "stage 1, 2 or 3",
    ),
    "unsharded at stage 1": (
        build_config(stage=1, section=MOMENTUM | {"sharded_update": False}),
        "sharded_update' is false, ZeRO stage is 1", "stage 0",
    ),
    "momentum method with SGD": (
        build_config(optimizer="SGD", section=MOMENTUM), "'sparse_momentum' and the optimizer is SGD", "Adam or AdamW",
    ),
    "momentum twice": (
        build_config(optimizer="SGD", section=GRADIENT | {"error_feedback": {"momentum": 0.9}}),
        "error_feedback.momentum' is 0.9 and the optimizer SGD has momentum 0.9", "applied twice",
    ),
    "momentum in feedback and Adam": (
        build_config(section=GRADIENT | {"error_feedback": {"momentum": 0.9}}), "AdamW has a first moment", "SGD",
    ),
    "L2 regularization": (
        build_config(section=MOMENTUM, optimizer="AdamL2"), "Adam adds weight decay to the gradient", "use AdamW",
    ),
    "everything excluded": (
        build_config(section={"exclude": {"min_numel": 10**6}}), "covers all 6 trained parameters", "has 957 elements",
    ),
    "fp16 autocast with clipping": (
        build_config(section=MOMENTUM, clipping=1.0, torch_autocast={"enabled": True, "dtype": "float16"}),
        "'gradient_clipping' is 1.0 with 'torch_autocast.dtype' float16", "bfloat16",
    ),
    "elastic checkpoints": (
        build_config(section=MOMENTUM, zero_optimization={"elastic_checkpoint": True}),
        "'zero_optimization.elastic_checkpoint' is true", "remove it",
    ),
    "another writer of checkpoints": (
        build_config(section=MOMENTUM, checkpoint={"writer": {"type": "python"}}),
        "'checkpoint.writer' is set", "remove it",
    ),
    "larger than dense": (
        build_config(optimizer="SGD", section=GRADIENT | {
            "compressor": {"density": 1.0}, "fallback": "error", "topology": {"ranks_per_node": 1},
            "exchange": {"link": {"latency_us": 0.0}}}),
        "'compressed_communication.fallback' is 'error'", "lower compressor.density",
    ),
}  # fmt: skip


@pytest.mark.core
@pytest.mark.parametrize("case", CASES)
def test_refused_with_key_value_and_remedy(case):
    newer = case in ("fp16 autocast with clipping", "another writer of checkpoints")
    if newer and not hasattr(DeepSpeedEngine, "torch_autocast_enabled"):
        pytest.skip("this version of DeepSpeed does not know the setting")
    config, setting, remedy = CASES[case]
    message = refusal(2, config)
    assert setting in message
    assert remedy in message


def test_sparse_embedding_is_refused_by_name():
    message = refusal(2, build_config(section=MOMENTUM), _sparse_embedding_model)
    assert "the embedding '0' has sparse=True" in message


def _fp16_at_stage_0() -> None:
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # the CPU says no; the refusal must come all the same
    build_engine(build_config(stage=0, dtype="fp16", optimizer="SGD", section=GRADIENT))


@pytest.mark.core
def test_fp16_at_stage_0_is_refused_with_the_reason():
    with pytest.raises(RankError, match="unscaled gradients"):
        run_ranks(2, _fp16_at_stage_0)


def _pipeline(more: dict[str, Any]) -> None:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed("gloo")
    model = PipelineModule(layers=list(build_model()), num_stages=1, loss_fn=torch.nn.functional.mse_loss)
    build_engine(build_config(dtype="bf16", section=MOMENTUM, **more), model=model)


@pytest.mark.core
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"stage": 0}, "PipelineModule in bf16 at ZeRO stage 0; .* What to do: set 'zero_optimization.stage' to 1"),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, "PipelineModule and 'data_types.grad_accum_dtype' is not its"),
    ],
)
def test_pipelines_that_accumulate_elsewhere_are_refused(more, message):
    with pytest.raises(RankError, match=message):
        run_ranks(2, _pipeline, more)


def _without_optimizer() -> None:
    config = build_config(stage=0, section=MOMENTUM)
    del config["optimizer"]
    build_engine(config)


@pytest.mark.core
def test_engine_without_an_optimizer_is_refused():
    with pytest.raises(RankError, match="the engine has no optimizer"):
        run_ranks(2, _without_optimizer)


def _uneven_nodes() -> None:
    os.environ["CROSS_RANK"] = "0" if int(os.environ["RANK"]) < 2 else "1"
    build_engine(build_config(section=MOMENTUM))


def test_uneven_nodes_are_listed():
    with pytest.raises(RankError, match=r"ranks \[0, 1\]; .*ranks \[2\]"):
        run_ranks(3, _uneven_nodes)


def _inactive(stage: int) -> str:
    engine = build_engine(build_config(stage=stage, optimizer="SGD", section=GRADIENT))
    if stage == 0:
        del engine._reduce_non_expert_gradients  # as a library would that brings its own reduction
    else:
        engine.optimizer.step = type(engine.optimizer).step.__get__(engine.optimizer)
    try:
        train(engine, 1)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained on, silently dense"


@pytest.mark.core
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_step_without_an_exchange_is_an_error_at_that_step(stage):
    for message in run_ranks(2, _inactive, stage):
        assert message.startswith("InactiveError")
        assert "at the accumulation boundary of step 1 there were 0 exchanges" in message


def test_the_batches_of_the_ranks_differ():
    """What the equality of replicas rests on: equal batches would make it hold without any exchange."""
    assert not torch.equal(batch(0, rank=0)[0], batch(0, rank=1)[0])


def test_an_adam_on_the_cpu_is_an_adam():
    """DeepSpeed's takes a minute to compile, so that only `make matrix` trains with it."""
    groups = [{"betas": (0.9, 0.95), "weight_decay": 0.0}]
    config = parse({"method": "sparse_momentum"})
    assert check_optimizer(OptimizerTraits("DeepSpeedCPUAdam", groups, True), config) == []
    with pytest.raises(ConfigError, match="the optimizer is CPUAdagrad; allowed is Adam or AdamW"):
        check_optimizer(OptimizerTraits("CPUAdagrad", groups, True), config)
