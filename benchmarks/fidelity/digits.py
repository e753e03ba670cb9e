"""SGD with momentum on digits with several agents in one process: `sparse_gradient` with DGC's momentum correction."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from examples.digits import ConvNet, Digits, accuracy


@dataclass(frozen=True)
class SparseSGD:
    """A run: settings as in the configuration section, at the defaults dense."""

    density: float = 1.0
    masking: bool = True
    plain: bool = False  # no momentum in compressed steps, but its gain: gradients times 1 / (1 - momentum)
    correction: bool = True  # momentum before the residual (DGC); otherwise in the optimizer, after the exchange
    dense_steps: int = 0
    densities: tuple[float, ...] = ()
    steps_per_density: int = 20
    steps: int = 300
    agents: int = 2
    batch: int = 32
    lr: float = 0.05
    momentum: float = 0.9
    min_numel: int = 1024

    def density_at(self, step: int) -> float:
        """Density of the step with this index (from 0)."""
        if step < self.dense_steps:
            return 1.0
        stage = (step - self.dense_steps) // self.steps_per_density
        return self.densities[stage] if stage < len(self.densities) else self.density

    def lr_at(self, step: int) -> float:
        """Linear decay to zero."""
        return self.lr * (1 - step / self.steps)


def gradients(model: ConvNet, data: Digits, run: SparseSGD, seed: int, step: int) -> Tensor:
    """Every agent's gradient, (agents, n), in the order of `model.parameters()`."""
    rows = []
    for agent in range(run.agents):
        images, labels = data.batch(run.batch, seed=seed, step=step, rank=agent)
        loss = F.cross_entropy(model(images), labels)
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    return torch.stack(rows)


def train(data: Digits, run: SparseSGD, seed: int) -> float:
    """Train; returns the accuracy on the test digits in percent."""
    torch.manual_seed(seed)
    model = ConvNet()
    parameters = list(model.parameters())
    sizes = [p.numel() for p in parameters]
    large = torch.cat([torch.full((size,), size >= run.min_numel) for size in sizes])
    velocity = torch.zeros(run.agents, len(large))
    residual = torch.zeros_like(velocity)
    after = torch.zeros(len(large))
    for step in range(run.steps):
        grads = gradients(model, data, run, seed, step)
        density = run.density_at(step)
        if run.plain and density < 1:
            residual += grads / (1 - run.momentum)
        else:
            residual += velocity.mul_(run.momentum).add_(grads) if run.correction else grads
        keys = residual.abs().masked_fill(~large, -1.0)
        chosen = keys.topk(max(1, round(density * int(large.sum()))), dim=1).indices
        taken = torch.zeros_like(residual, dtype=torch.bool).scatter_(1, chosen, True)
        sent = (residual * (taken | ~large)).mean(0)
        residual.masked_fill_(taken | ~large, 0.0)
        if run.masking and density < 1:
            velocity.masked_fill_(taken, 0.0)
        update = sent if run.correction else after.mul_(run.momentum).add_(sent)
        with torch.no_grad():
            for p, part in zip(parameters, update.split(sizes), strict=True):
                p.sub_(part.view_as(p), alpha=run.lr_at(step))
    return accuracy(model, data.test)
