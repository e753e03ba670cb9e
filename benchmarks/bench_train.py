"""Time to a validation loss on slow links: ours against DeepSpeed and DistributedDataParallel.

    python -m benchmarks.bench_train                                        # 2x2 hosts at 200 Mbit/s; needs root
    python -m benchmarks.bench_train --rate unshaped --json out.json --plot out.png

Every peer trains the same GPT on the same batches of real text (examples/lm), for the same number of steps, on hosts
that are network namespaces with shaped links (benchmarks/cluster). The target is the validation loss that the fastest
dense peer has at its end; a peer's time to it is interpolated between validations, whose own time does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import ds_sparse
import tests.engines  # noqa: F401  (imports once what engines import late, and builds no kernels of DeepSpeed's)
from benchmarks.cluster import Cluster
from examples.lm.data import Corpus, load_corpus, train_batch, validation_batches
from examples.lm.model import GPT, GPTConfig

MODEL = GPTConfig(context=64, layers=4, heads=6, width=384)  # 7.3 million parameters
BATCH, WARMUP, LR, BETAS, DECAY = 1, 40, 1e-3, (0.9, 0.95), 0.1
VALIDATION_WINDOWS, VALIDATION_BATCH = 256, 16
FREEZE_STEP = 20  # dense steps cost seven times as much; that early, the variance is hardly stable
JOB_SECONDS = 3600


class Trainer(NamedTuple):
    """What the loop needs of a peer."""

    model: torch.nn.Module
    step: Callable[[torch.Tensor], None]
    sent: Callable[[], int] = lambda: 0


class Point(NamedTuple):
    """A validation: after so many steps and seconds of training."""

    step: int
    seconds: float
    loss: float


# ---- peers ------------------------------------------------------------------------------------------------------


def ddp(steps: int, hook: str = "") -> Trainer:
    """torch, with gradients averaged in the background of backward."""
    # PowerSGD crashes on gloo when two buckets are under way.
    model = DistributedDataParallel(GPT(MODEL), bucket_cap_mb=1000 if hook else None)
    if hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=10)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY)
    schedule = scheduler(steps, optimizer)

    def step(loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()

    return Trainer(model, step)


def engine(steps: int, stage: int, section: dict[str, Any] | None = None) -> Trainer:
    """DeepSpeed; with `section`, ours."""
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LR, "betas": list(BETAS), "weight_decay": DECAY, "torch_adam": True},
        },
        "zero_optimization": {"stage": stage},
    }
    if section is not None:
        config["compressed_communication"] = copy.deepcopy(section)
    initialize = deepspeed.initialize if section is None else ds_sparse.initialize
    model = GPT(MODEL)
    made, *_ = initialize(
        model=model, model_parameters=model.parameters(), config=config, lr_scheduler=partial(scheduler, steps)
    )

    def step(loss: torch.Tensor) -> None:
        made.backward(loss)
        made.step()

    if section is None:
        return Trainer(made, step)
    return Trainer(made, step, lambda: made.compressed_communication.stats.total.inter_node_bytes)


def momentum(density: float, **exchange: Any) -> dict[str, Any]:
    return {
        "method": "sparse_momentum",
        "compressor": {"density": density},
        "sparse_momentum": {"freeze_step": FREEZE_STEP},
        "exchange": exchange,
    }


PEERS: dict[str, Callable[[int], Trainer]] = {
    "DDP, overlapped": ddp,
    "DeepSpeed ZeRO-0": partial(engine, stage=0),
    "DeepSpeed ZeRO-1": partial(engine, stage=1),
    "DDP, PowerSGD rank 4": partial(ddp, hook="powersgd"),
    "ours, dense": partial(engine, stage=1, section={"method": "dense"}),
    "ours, 1 %": partial(engine, stage=1, section=momentum(0.01)),
    "ours, 5 %": partial(engine, stage=1, section=momentum(0.05)),
    "ours, 10 %, int4": partial(engine, stage=1, section=momentum(0.1, value_dtype="int4")),
    "ours, 20 %, int4": partial(engine, stage=1, section=momentum(0.2, value_dtype="int4")),
}
DENSE = ("DDP, overlapped", "DeepSpeed ZeRO-0", "DeepSpeed ZeRO-1")


# ---- on the ranks -----------------------------------------------------------------------------------------------


def scheduler(steps: int, optimizer: torch.optim.Optimizer) -> LambdaLR:
    """Linear warm-up, then a cosine down to a tenth."""

    def factor(step: int) -> float:
        if step < WARMUP:
            return (step + 1) / WARMUP
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - WARMUP) / max(1, steps - WARMUP))))

    return LambdaLR(optimizer, factor)


def train(peer: str, corpus: Corpus, steps: int, every: int, seed: int) -> tuple[list[Point], int]:
    """Runs on every rank; validations and the bytes that this rank counted."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    trainer, rank = PEERS[peer](steps), dist.get_rank()
    points, seconds = [], 0.0
    for step in range(1, steps + 1):
        tokens, targets = train_batch(corpus.train, BATCH, MODEL.context, seed=seed, step=step, rank=rank)
        begin = time.perf_counter()
        trainer.step(trainer.model(tokens, targets))
        seconds += time.perf_counter() - begin
        if step % every == 0 or step == steps:
            points.append(Point(step, seconds, validate(trainer.model, corpus)))
    return points, trainer.sent()


@torch.no_grad()
def validate(model: torch.nn.Module, corpus: Corpus) -> float:
    """Mean loss over fixed windows of text that is not trained on, each rank taking its share."""
    rank, world = dist.get_rank(), dist.get_world_size()
    inner = getattr(model, "module", model)
    batches = validation_batches(
        corpus.validation, VALIDATION_WINDOWS, VALIDATION_BATCH, MODEL.context, rank=rank, world=world
    )
    total = torch.stack([inner(tokens, targets) * len(tokens) for tokens, targets in batches]).sum()
    dist.all_reduce(total)
    return total.item() / VALIDATION_WINDOWS


# ---- tables -----------------------------------------------------------------------------------------------------


def time_to(points: list[Point], loss: float) -> float:
    """Seconds until a loss was reached first, linear between validations; nan when it was not."""
    for before, after in zip([None, *points], points, strict=False):
        if after.loss <= loss:
            if before is None:
                return after.seconds
            return before.seconds + (after.seconds - before.seconds) * (before.loss - loss) / (before.loss - after.loss)
    return math.nan


def summarize(curves: dict[str, list[Point]]) -> tuple[str, float, dict[str, float]]:
    """The fastest dense peer, its last loss, and the seconds that every peer needed for that."""
    best = min((name for name in DENSE if name in curves), key=lambda name: curves[name][-1].seconds)
    target = curves[best][-1].loss
    return best, target, {name: time_to(points, target) for name, points in curves.items()}


def table(curves: dict[str, list[Point]], sent: dict[str, int]) -> str:
    best, target, reached = summarize(curves)
    lines = [f"\ntarget: validation loss {target:.4f}, that of {best} at its end"]
    lines.append(f"{'':34}{'last loss':>10}{'s/step':>8}{'s to target':>12}{'best dense/it':>14}{'MB a rank':>10}")
    for name, points in curves.items():
        last = points[-1]
        lines.append(
            f"{name:34}{last.loss:10.4f}{last.seconds / last.step:8.3f}{reached[name]:12.1f}"
            f"{reached[best] / reached[name]:14.2f}{sent[name] / 1e6:10.1f}"
        )
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layout", default="2x2", help="hosts x ranks a host")
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=20, help="steps between validations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peers", nargs="+", default=[], help=f"parts of the names of peers: {', '.join(PEERS)}")
    parser.add_argument("--json", type=Path, help="write the curves here")
    parser.add_argument("--plot", type=Path, help="draw loss against time here")
    return parser.parse_args()


def clusters(args: argparse.Namespace) -> Iterator[tuple[str, Cluster]]:
    """A fresh cluster for each peer."""
    hosts = int(args.layout.split("x")[0])
    for name in PEERS:
        if not args.peers or any(part in name for part in args.peers):
            with Cluster(hosts=hosts, rate=None if args.rate == "unshaped" else args.rate) as cluster:
                yield name, cluster


def main() -> None:
    args, corpus = arguments(), load_corpus()
    curves: dict[str, list[Point]] = {}
    sent: dict[str, int] = {}
    ranks_per_host = int(args.layout.split("x")[1])
    with contextlib.closing(clusters(args)) as fresh:
        for name, cluster in fresh:
            ranks = cluster.run_ranks(
                ranks_per_host, train, name, corpus, args.steps, args.every, args.seed, timeout=JOB_SECONDS
            )
            curves[name], sent[name] = ranks[0]
            last = curves[name][-1]
            print(f"{name}: loss {last.loss:.4f} after {last.step} steps in {last.seconds:.1f} s", flush=True)
    print(table(curves, sent))
    if args.json:
        result = {"layout": args.layout, "rate": args.rate, "sent_bytes": sent, "curves": curves}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.plot:
        from benchmarks.plots import loss_against_time

        loss_against_time(curves, args.plot)


if __name__ == "__main__":
    main()
