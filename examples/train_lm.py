"""Train a small GPT on the sources of the Python standard library.

    deepspeed --num_accelerators 4 examples/train_lm.py --deepspeed_config configs/mstopk_zero1.json

Everything about communication stands in the configuration file; the one line here that differs from a plain
DeepSpeed script is the call of `ds_sparse.initialize`.
"""

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import Traffic, across_ranks, add_common_arguments, finish, log_loss, progress, start, write_result
from lm.data import Corpus, load_corpus, train_batch, validation_batches
from lm.model import GPT, GPTConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import ds_sparse

VALIDATION_WINDOWS = 256


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warmup", type=int, default=40, help="steps in which the learning rate rises")
    parser.add_argument("--layers", type=int, default=GPTConfig.layers)
    parser.add_argument("--width", type=int, default=GPTConfig.width)
    parser.add_argument("--heads", type=int, default=GPTConfig.heads)
    parser.add_argument("--context", type=int, default=GPTConfig.context)
    add_common_arguments(parser, steps=400)
    return parser.parse_args()


def warmup_then_cosine(warmup: int, steps: int, final: float = 0.1) -> Callable[[Optimizer], LambdaLR]:
    """Factory of a schedule: linear rise over `warmup` steps, then a cosine down to `final` of the peak."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, steps - warmup))
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))

    return lambda optimizer: LambdaLR(optimizer, factor)


def train(engine: Any, corpus: Corpus, args: argparse.Namespace, traffic: Traffic) -> float:
    """Train for `args.steps` optimizer steps; returns the last mean training loss that was printed."""
    rank, world = dist.get_rank(), dist.get_world_size()
    batch, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    begun, mean_loss = time.perf_counter(), math.nan
    for step in range(1, args.steps + 1):
        for micro in range(accumulation):
            index = (step - 1) * accumulation + micro
            tokens, targets = train_batch(corpus.train, batch, args.context, seed=args.seed, step=index, rank=rank)
            loss = engine(tokens.to(engine.device), targets.to(engine.device))
            engine.backward(loss)
            engine.step()
        traffic.after_step()
        if step % args.log_every == 0 or step == args.steps:
            mean_loss = across_ranks([loss.item()], engine.device)[0] / world
            since = (step - 1) % args.log_every + 1
            rate = since * accumulation * batch * world * args.context / (time.perf_counter() - begun)
            line = progress(traffic, step, args.steps, mean_loss, f"{rate:8,.0f} tokens/s")
            log_loss(engine, mean_loss)
            if rank == 0:
                print(line, flush=True)
            begun = time.perf_counter()
    return mean_loss


@torch.no_grad()
def validate(engine: Any, corpus: Corpus, context: int) -> float:
    """Mean loss over fixed windows of the validation files, each rank taking its share."""
    rank, world = dist.get_rank(), dist.get_world_size()
    windows = VALIDATION_WINDOWS // world * world
    engine.eval()
    total, count = 0.0, 0
    for tokens, targets in validation_batches(corpus.validation, windows, 16, context, rank=rank, world=world):
        total += engine(tokens.to(engine.device), targets.to(engine.device)).item() * len(tokens)
        count += len(tokens)
    total, count = across_ranks([total, count], engine.device)
    return total / count


def main() -> None:
    """Train, validate, report."""
    args = parse_arguments()
    start(args.seed)
    corpus = load_corpus()
    model = GPT(GPTConfig(context=args.context, layers=args.layers, heads=args.heads, width=args.width))
    engine, *_ = ds_sparse.initialize(
        args=args,
        model=model,
        model_parameters=model.parameters(),
        lr_scheduler=warmup_then_cosine(args.warmup, args.steps),
    )
    traffic = Traffic(engine)
    begun = time.perf_counter()
    train_loss = train(engine, corpus, args, traffic)
    seconds = time.perf_counter() - begun
    validation_loss = validate(engine, corpus, args.context)
    result = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": args.steps,
        "seed": args.seed,
        "ranks": dist.get_world_size(),
        "seconds": seconds,
        "train_loss": train_loss,
        "validation_loss": validation_loss,
        **traffic.summary(),
    }
    write_result(args.result, result)
    if dist.get_rank() == 0:
        print(f"validation loss {validation_loss:.4f} after {args.steps} steps in {seconds:.1f} s", flush=True)
    finish()


if __name__ == "__main__":
    main()
