"""Models, and the ways that users write one optimizer step, for the rows of `features`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from tests.engines import backward, batch, build_model

BAD_STEP = 1

# ---- one optimizer step, in the ways that users write it ---------------------------------------------------------


def managed(engine: Any, step: int) -> float:
    """The usual loop: `step` after every micro batch. Batches repeat, so that the loss falls."""
    losses = []
    for i in range(engine.gradient_accumulation_steps()):
        losses.append(backward(engine, i))
        engine.step()
    return sum(losses)


def unmanaged(engine: Any, step: int) -> float:
    loss = backward(engine, 0) + backward(engine, 1)
    engine.step()
    return loss


def no_sync(engine: Any, step: int) -> float:
    with engine.no_sync():
        loss = backward(engine, 0)
    loss += backward(engine, 1)
    engine.step()
    return loss


def coalesced(engine: Any, step: int) -> float:
    with engine.coalesce_grad_reduction():
        loss = backward(engine, 0) + backward(engine, 1)
    engine.step()
    return loss


def own_boundary(engine: Any, step: int) -> float:
    engine.set_gradient_accumulation_boundary(False)
    loss = backward(engine, 0)
    engine.set_gradient_accumulation_boundary(True)
    loss += backward(engine, 1)
    engine.step()
    return loss


def poisoned(engine: Any, step: int) -> float:
    """One rank gets an infinite gradient once; at stage 0 DeepSpeed looks for it in float16 only."""
    if step != BAD_STEP:
        return managed(engine, step)
    checked = engine.zero_optimization_stage() > 0 or engine.torch_autocast_z0_gradscaler is not None
    if not checked and not hasattr(engine, "compressed_communication"):
        return 0.0
    weight = next(p for p in engine.module.parameters() if p.requires_grad)
    with poison(weight) if dist.get_rank() == 3 else contextlib.nullcontext():
        return managed(engine, step)


@contextlib.contextmanager
def poison(weight: torch.nn.Parameter) -> Iterator[None]:
    handle = weight.register_hook(lambda grad: grad.fill_(float("inf")))
    yield
    handle.remove()


# ---- models ------------------------------------------------------------------------------------------------------


class Frozen(torch.nn.Module):
    """A frozen parameter in front of the usual model, and a layer of it frozen too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((17,), 1.5), requires_grad=False)
        self.body = build_model()
        self.body[2].weight.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.body(inputs * self.scale)


class Unused(torch.nn.Module):
    """A layer that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = build_model()
        self.unused = torch.nn.Linear(7, 9)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.body(inputs)


class Tied(torch.nn.Module):
    """One weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(17, 17), torch.nn.Linear(17, 17)
        self.second.weight = self.first.weight
        self.last = build_model()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(inputs)))))


class Checkpointed(torch.nn.Module):
    """Activations are computed again in backward; with `reentrant` by a second backward inside the first."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body, self._reentrant = build_model(), reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        hidden = self.body[0](inputs)
        hidden = checkpoint(self.body[1:3], hidden, use_reentrant=self._reentrant)
        return self.body[3:](hidden)


class Sliced(torch.nn.Module):
    """Two layers to split over tensor-parallel ranks; what stands around them is copied to each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = torch.nn.LayerNorm(17)
        self.wide, self.narrow = torch.nn.Linear(17, 32), torch.nn.Linear(32, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.narrow(torch.tanh(self.wide(self.norm(inputs))))


AUTO_TP = {
    "tensor_parallel": {
        "autotp_size": 2,
        "partition_config": {
            "use_default_specs": False,
            "layer_specs": [
                {"patterns": [r"^wide\.weight$"], "partition_type": "column"},
                {"patterns": [r"^narrow\.weight$"], "partition_type": "row"},
            ],
        },
    }
}


def sliced(engine: Any, step: int) -> float:
    """Tensor-parallel ranks see the same batch."""
    inputs, targets = batch(0, rank=dist.get_rank() // 2)
    dtype = next(engine.module.parameters()).dtype
    loss = torch.nn.functional.mse_loss(engine(inputs.to(dtype)).float(), targets)
    engine.backward(loss)
    engine.step()
    return loss.item()


def sequence_parallel(model: torch.nn.Module) -> dict[str, Any]:
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    deepspeed.init_distributed("gloo")
    parallel_state_sp._release_sequence_parallel_groups()
    parallel_state_sp.initialize_sequence_parallel(2)
    return {"mpu": parallel_state_sp}


def pipeline(tied: bool) -> torch.nn.Module:
    """Two stages; with `tied`, one weight in a layer of each."""
    from deepspeed.pipe import PipelineModule, TiedLayerSpec

    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    layers: list[Any] = list(build_model())
    if tied:
        one = TiedLayerSpec("one", torch.nn.Linear, 17, 17)
        layers = [one, torch.nn.Tanh(), torch.nn.Linear(17, 17), torch.nn.Tanh(), one, torch.nn.Linear(17, 5)]

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(outputs.float(), targets)

    return PipelineModule(layers, num_stages=2, partition_method="uniform", loss_fn=loss)


def piped(engine: Any, step: int) -> float:
    dtype = next(engine.module.parameters()).dtype
    micro = [batch(i, rank=engine.grid.get_data_parallel_rank()) for i in range(engine.gradient_accumulation_steps())]
    return float(engine.train_batch(iter([(inputs.to(dtype), targets) for inputs, targets in micro])))


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.body = build_model()
        self.experts = MoE(5, torch.nn.Linear(5, 5), num_experts=2, ep_size=2, k=1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.experts(self.body(inputs))[0]


def expert_groups(model: torch.nn.Module) -> dict[str, Any]:
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    return {"model_parameters": split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "all"})}


class SparseTable(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = build_model()
        self.table = torch.nn.Embedding(8, 17, sparse=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.body(inputs + self.table(torch.arange(len(inputs))))


def two_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "lr": 0.05},
    ]
