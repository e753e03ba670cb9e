"""AdamW on a small GPT with several agents in one process: the two-phase `sparse_momentum` method and its variants.

An agent stands for a node: it has its own data, its own momentum and its own residual. Parameters are the same on all
agents by construction, so one copy of the model serves them all.
"""

import math
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from examples.lm.data import Corpus, train_batch, validation_batches
from examples.lm.model import GPT, GPTConfig


@dataclass(frozen=True)
class Task:
    """What is trained, and for how long; the same for dense and for compressed."""

    model: GPTConfig = GPTConfig()
    steps: int = 400
    agents: int = 2
    batch: int = 8
    lr: float = 2e-3
    warmup: int = 40
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    final_lr: float = 0.1

    def lr_at(self, step: int) -> float:
        """Learning rate of the step with this index (from 0): linear warm-up, then cosine to `final_lr` of the peak."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (self.final_lr + (1 - self.final_lr) * 0.5 * (1 + math.cos(math.pi * progress)))


@dataclass(frozen=True)
class Variant:
    """One way of running the compressed phase."""

    density: float = 0.01
    clip: str = "rms"  # "none", "local" or "rms": see `clip_factors`
    select_power: float = 0.0  # select on |residual| / (sqrt(v) + eps)**power: 0 the momentum, 1 the update
    bias_correction: bool = True
    residual_decay: float = 1.0
    masking: bool = False
    densities: tuple[float, ...] = ()
    steps_per_density: int = 20
    momentum_after: bool = False  # compress gradients, and keep one common momentum of what arrives
    rescale: int = 0  # follow the variance by one number per so many elements; -1: one per tensor; 0: none
    nesterov: bool = False
    beta1: float | None = None  # of the compressed phase; None: that of the dense phase
    lr_scale: float = 1.0

    def density_at(self, age: int) -> float:
        """Density of the compressed step with this index (from 0)."""
        stage = age // self.steps_per_density
        return self.densities[stage] if stage < len(self.densities) else self.density


@dataclass
class State:
    """Everything that a run carries from step to step."""

    step: int
    parameters: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    local_sq: Tensor  # moving average of the square of the agents' own gradients
    history: list[float] = field(default_factory=list)  # ||v_hat||_1 after every dense step

    def clone(self) -> "State":
        """A copy to start a branch from."""
        tensors = (self.parameters, self.exp_avg, self.exp_avg_sq, self.local_sq)
        return State(self.step, *(t.clone() for t in tensors), list(self.history))


class Simulation:
    """A model whose parameters and gradients are views of two flat vectors, and the data of every agent."""

    def __init__(self, task: Task, corpus: Corpus, seed: int, min_numel: int = 1024) -> None:
        torch.manual_seed(seed)
        self.task, self.corpus, self.seed = task, corpus, seed
        self.model = GPT(task.model)
        # Small parameters first: the compressed ones are then one contiguous tail of the flat vector.
        parameters = sorted(self.model.parameters(), key=lambda p: p.numel() >= min_numel)
        self.sizes = [p.numel() for p in parameters]
        self.small = sum(size for size in self.sizes if size < min_numel)
        self.flat = torch.cat([p.detach().flatten() for p in parameters])
        self.grad = torch.zeros_like(self.flat)
        for p, data, grad in zip(parameters, self.flat.split(self.sizes), self.grad.split(self.sizes), strict=True):
            p.data, p.grad = data.view_as(p), grad.view_as(p)
        self.validation = validation_batches(corpus.validation, 256, 32, self.model.config.context)
        zeros = torch.zeros_like(self.flat)
        self.start = State(0, self.flat.clone(), zeros, zeros.clone(), zeros.clone())

    def gradients(self, state: State) -> tuple[Tensor, float]:
        """Every agent's gradient at the common parameters, (agents, n), and the mean loss."""
        self.flat.copy_(state.parameters)
        rows, losses = [], []
        for agent in range(self.task.agents):
            self.grad.zero_()
            batch = train_batch(self.corpus.train, self.task.batch, self.model.config.context,
                                seed=self.seed, step=state.step, rank=agent)
            loss = self.model(*batch)
            loss.backward()
            rows.append(self.grad.clone())
            losses.append(loss.item())
        return torch.stack(rows), sum(losses) / len(losses)

    @torch.no_grad()
    def validate(self, state: State) -> float:
        """Mean validation loss."""
        self.flat.copy_(state.parameters)
        return sum(self.model(*batch).item() for batch in self.validation) / len(self.validation)

    def blocks(self, size: int) -> Tensor:
        """Block number of every element, (n,): blocks of `size` elements inside the tensors, or whole tensors at -1."""
        sizes = []
        for numel in self.sizes:
            step = numel if size < 0 else size
            sizes += [min(step, numel - begin) for begin in range(0, numel, step)]
        return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))

    def apply(self, state: State, update: Tensor, lr: float) -> None:
        """Decoupled weight decay, then the update."""
        state.parameters.mul_(1 - lr * self.task.weight_decay).add_(update, alpha=-lr)
        state.step += 1

    def dense_step(self, state: State) -> float:
        """One step of AdamW on the mean gradient; returns the training loss."""
        task, (beta1, beta2) = self.task, self.task.betas
        gradients, loss = self.gradients(state)
        gradients *= min(1.0, task.clip / float(gradients.mean(0).norm()))
        mean = gradients.mean(0)
        state.exp_avg.lerp_(mean, 1 - beta1)
        state.exp_avg_sq.lerp_(mean.square(), 1 - beta2)
        state.local_sq.lerp_(gradients.square().mean(0), 1 - beta2)
        t = state.step + 1
        v_hat = state.exp_avg_sq / (1 - beta2**t)
        state.history.append(float(v_hat.sum()))
        self.apply(state, state.exp_avg / (1 - beta1**t) / (v_hat.sqrt() + task.eps), task.lr_at(state.step))
        return loss


def clip_factors(gradients: Tensor, limit: float, rule: str) -> Tensor:
    """Factor of every agent's gradient, (agents, 1).

    local: each agent clips its own norm to `limit`. rms: one common factor, from the root mean square of the norms;
    independent noise makes the norm of a mean sqrt(agents) smaller than that, so the limit grows by sqrt(agents).
    """
    norms = gradients.norm(dim=1, keepdim=True)
    if rule == "none":
        return torch.ones_like(norms)
    if rule == "local":
        return (limit / norms).clamp(max=1.0)
    rms = norms.square().mean().sqrt()
    return (limit * math.sqrt(len(gradients)) / rms).clamp(max=1.0).expand_as(norms)


class CompressedPhase:
    """What the agents hold after the variance is frozen, and the step that they take."""

    def __init__(self, simulation: Simulation, state: State, variant: Variant) -> None:
        task, beta2 = simulation.task, simulation.task.betas[1]
        self.simulation, self.state, self.variant, self.frozen_at = simulation, state, variant, state.step
        self.scale = (state.exp_avg_sq / (1 - beta2**state.step)).sqrt() + task.eps
        if variant.rescale:
            self.block = simulation.blocks(variant.rescale)
            self.reference = self.block_sums(state.local_sq) / (1 - beta2**state.step)
        self.momentum = state.exp_avg.repeat(task.agents, 1)
        self.residual = torch.zeros(task.agents, simulation.flat.numel() - simulation.small)
        self.gradient_norms: list[float] = []

    def block_sums(self, values: Tensor) -> Tensor:
        """Sum of `values` over every block."""
        return torch.zeros(int(self.block[-1]) + 1).index_add_(0, self.block, values) + 1e-30

    def select(self, stream: Tensor, scale: Tensor) -> Tensor:
        """Mean of what the agents send of `stream` (agents, n): all of the small head, the top k of the large tail."""
        small, variant = self.simulation.small, self.variant
        self.residual.mul_(variant.residual_decay).add_(stream[:, small:])
        k = max(1, round(variant.density_at(self.state.step - self.frozen_at) * self.residual.shape[1]))
        keys = self.residual / scale[small:] ** variant.select_power if variant.select_power else self.residual
        chosen = keys.abs().topk(k, dim=1, sorted=False).indices
        sent = torch.zeros_like(self.residual).scatter_(1, chosen, self.residual.gather(1, chosen))
        self.residual.scatter_(1, chosen, 0.0)
        if variant.masking:
            self.momentum[:, small:].scatter_(1, chosen, 0.0)
        return torch.cat([stream[:, :small].mean(0), sent.mean(0)])

    def step(self) -> float:
        """One compressed step; returns the training loss."""
        task, variant, state = self.simulation.task, self.variant, self.state
        beta1, beta2 = task.betas
        beta1 = beta1 if variant.beta1 is None else variant.beta1
        gradients, loss = self.simulation.gradients(state)
        gradients *= clip_factors(gradients, task.clip, variant.clip)
        scale, t = self.scale, state.step + 1
        if variant.rescale:
            state.local_sq.lerp_(gradients.square().mean(0), 1 - beta2)
            growth = self.block_sums(state.local_sq) / (1 - beta2**t) / self.reference
            scale = scale * growth.clamp(0.01, 100.0).sqrt()[self.block]
        if variant.momentum_after:
            state.exp_avg.lerp_(self.select(gradients, scale), 1 - beta1)
            mean = state.exp_avg
        else:
            self.momentum.lerp_(gradients, 1 - beta1)
            ahead = self.momentum.lerp(gradients, 1 - beta1) if variant.nesterov else self.momentum
            mean = self.select(ahead, scale)
        correction = 1 - beta1**t if variant.bias_correction else 1.0
        self.simulation.apply(state, mean / scale / correction, variant.lr_scale * task.lr_at(state.step))
        return loss


def finish(simulation: Simulation, snapshot: State, variant: Variant | None) -> float:
    """Train from a snapshot to the end, dense if `variant` is None; returns the validation loss."""
    state = snapshot.clone()
    phase = CompressedPhase(simulation, state, variant) if variant else None
    while state.step < simulation.task.steps:
        phase.step() if phase else simulation.dense_step(state)
    return simulation.validate(state)


def dense_run(simulation: Simulation, snapshots_at: tuple[int, ...]) -> tuple[float, dict[int, State], list[float]]:
    """A dense run: its validation loss, snapshots after the given numbers of steps, and ||v_hat||_1 of every step."""
    state, snapshots, begun = simulation.start.clone(), {}, time.perf_counter()
    while state.step < simulation.task.steps:
        simulation.dense_step(state)
        if state.step in snapshots_at:
            snapshots[state.step] = state.clone()
    del begun
    return simulation.validate(state), snapshots, state.history


def freeze_step(history: list[float], beta2: float, ratio: float, not_before: int) -> int | None:
    """First step count with ||v_hat||_1 within [ratio, 1/ratio] of its value ceil(1/(1-beta2)) steps before."""
    window = math.ceil(1 / (1 - beta2))
    for step in range(max(not_before, 2 * window), len(history)):
        if ratio <= history[step] / history[step - window] <= 1 / ratio:
            return step + 1
    return None
