"""Each method against its textbook form, written out for all nodes in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.engines import batch, build_config, build_engine, build_model, furthest, train
from tests.ranks import run_ranks

NODES = 4  # one rank each, so that a shard is the whole model
STEPS = 20
DENSITY = 0.05


def _train(stage: int, optimizer: str, section: dict[str, Any], more: dict[str, Any]) -> list[torch.Tensor]:
    section = {"topology": {"ranks_per_node": 1}, "exclude": {"min_numel": 0}} | section
    return train(build_engine(build_config(stage=stage, optimizer=optimizer, section=section, **more)), STEPS)


class Textbook:
    """One model and the gradient of each node, in plain torch."""

    def __init__(self) -> None:
        self.model = build_model()
        self.params = list(self.model.parameters())
        self.flat = torch.cat([p.detach().reshape(-1) for p in self.params])
        self.numel = self.flat.numel()
        self.k = math.ceil(DENSITY * self.numel)
        self.sizes = [p.numel() for p in self.params]

    def gradients(self, step: int) -> list[torch.Tensor]:
        torch.nn.utils.vector_to_parameters(self.flat, self.params)
        gradients = []
        for node in range(NODES):
            inputs, targets = batch(step, rank=node)
            loss = torch.nn.functional.mse_loss(self.model(inputs), targets)
            gradients.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, self.params)]))
        return gradients

    def top_k(self, vector: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros_like(vector, dtype=torch.bool)
        mask[vector.abs().topk(self.k).indices] = True
        return mask


# Both sides compute the same sums in another order; top-k may swap two entries whose magnitudes agree to 1e-7, which
# then differ by one step's worth of such an entry. None of that reaches 1e-4 of parameters of order 0.1.
CLOSE = 2e-5


def _textbook_sgd(momentum: float, decay: float, masking: bool) -> list[torch.Tensor]:
    book, history = Textbook(), []
    residual = [torch.zeros(book.numel) for _ in range(NODES)]
    velocity = [torch.zeros(book.numel) for _ in range(NODES)]
    for step in range(STEPS):
        mean = torch.zeros(book.numel)
        for i, gradient in enumerate(book.gradients(step)):
            velocity[i] = momentum * velocity[i] + gradient
            residual[i] = decay * residual[i] + velocity[i]
            mask = book.top_k(residual[i])
            mean += residual[i] * mask / NODES
            residual[i] *= ~mask
            if masking:
                velocity[i] *= ~mask
        book.flat = book.flat - 0.1 * mean
        history.append(book.flat.clone())
    return history


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 1.0), (0.9, 1.0), (0.0, 0.5)])
def test_sparse_gradient_is_sgd_with_error_feedback(stage, momentum, decay):
    section = {
        "method": "sparse_gradient",
        "compressor": {"density": DENSITY},
        "error_feedback": {"momentum": momentum, "decay": decay},
    }
    ours = run_ranks(NODES, _train, stage, "SGD0", section, {})[0]
    assert furthest(ours, _textbook_sgd(momentum, decay, masking=True)) < CLOSE


def test_masking_matters():
    """The control of the test above: without factor masking the trajectory is another one."""
    with_mask, without = _textbook_sgd(0.9, 1.0, masking=True), _textbook_sgd(0.9, 1.0, masking=False)
    assert furthest(with_mask, without) > 100 * CLOSE


def _textbook_two_phase_adam(freeze_step: int, clip: float, own_beta1: float) -> list[torch.Tensor]:
    book, history = Textbook(), []
    beta1, beta2, eps, lr, decay = 0.9, 0.95, 1e-8, 1e-2, 1e-2
    m, v = torch.zeros(book.numel), torch.zeros(book.numel)
    residual = [torch.zeros(book.numel) for _ in range(NODES)]
    moments: list[torch.Tensor] = []
    for step in range(STEPS):
        gradients = book.gradients(step)
        if step < freeze_step:
            mean = torch.stack(gradients).mean(0)
            mean = mean * min(1.0, clip / float(mean.norm()))
            m = beta1 * m + (1 - beta1) * mean
            v = beta2 * v + (1 - beta2) * mean**2
            update, v_hat = m / (1 - beta1 ** (step + 1)), v / (1 - beta2 ** (step + 1))
        else:
            if step == freeze_step:
                moments = [m / (1 - beta1**step) for _ in range(NODES)]
                v_hat = torch.cat([part.clamp(min=0.01 * float(part.mean())) for part in v_hat.split(book.sizes)])
            norm = math.sqrt(sum(float(g.norm()) ** 2 for g in gradients)) / NODES
            update = torch.zeros(book.numel)
            for i, gradient in enumerate(gradients):
                moments[i] = own_beta1 * moments[i] + (1 - own_beta1) * gradient * min(1.0, clip / norm)
                residual[i] = residual[i] + moments[i]
                mask = book.top_k(residual[i])
                update += residual[i] * mask / NODES
                residual[i] *= ~mask
        book.flat = book.flat * (1 - lr * decay)
        book.flat = book.flat - lr * update / (v_hat.sqrt() + eps)
        history.append(book.flat.clone())
    return history


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(("clip", "beta1"), [(math.inf, 0.9), (0.1, 0.5)])
def test_sparse_momentum_is_two_phase_adam(stage, clip, beta1):
    section = {
        "method": "sparse_momentum",
        "compressor": {"density": DENSITY},
        "sparse_momentum": {"freeze_step": 8, "beta1": beta1},
    }
    more = {"clipping": 0.0 if clip == math.inf else clip}
    ours = run_ranks(NODES, _train, stage, "AdamW", section, more)[0]
    assert furthest(ours, _textbook_two_phase_adam(8, clip, beta1)) < 5 * CLOSE  # Adam divides by small numbers


def _stock(optimizer: str) -> list[torch.Tensor]:
    return train(build_engine(build_config(stage=1, optimizer=optimizer), ours=False), STEPS)


def test_momentum_in_the_feedback_is_the_optimizers_while_everything_is_sent():
    section = {
        "method": "sparse_gradient",
        "error_feedback": {"momentum": 0.9},
        "schedule": {"dense_steps": STEPS},
    }
    ours = run_ranks(NODES, _train, 1, "SGD0", section, {})[0]
    stock = run_ranks(NODES, _stock, "SGD")[0]
    assert furthest(ours, stock) < 2e-6  # the same sums in another order


def _densities(section: dict[str, Any]) -> list[float]:
    engine = build_engine(build_config(optimizer="SGD0", section=section))
    seen = []
    for step in range(9):
        train(engine, 1, start=step)
        seen.append(round(engine.compressed_communication.stats.last.density, 2))
    return seen


def test_density_schedule_falls_as_written():
    section = {
        "method": "sparse_gradient",
        "topology": {"ranks_per_node": 1},
        "compressor": {"density": 0.05},
        "exclude": {"min_numel": 0},
        "schedule": {"dense_steps": 2, "densities": [0.4, 0.1], "steps_per_density": 3},
    }
    assert run_ranks(2, _densities, section)[0] == [1.0, 1.0, 0.4, 0.4, 0.4, 0.1, 0.1, 0.1, 0.05]
