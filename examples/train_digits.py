"""Train a small convolutional net on scikit-learn's digits with SGD and momentum.

    deepspeed --num_accelerators 4 examples/train_digits.py --deepspeed_config configs/digits_sparse_gradient.json

The momentum stands in the configuration: in the optimizer for a dense run, in `error_feedback` for a sparse one.
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from common import Traffic, add_common_arguments, finish, log_loss, progress, start, write_result
from digits import ConvNet, Digits, accuracy, load
from torch.optim.lr_scheduler import LambdaLR

import ds_sparse


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser, steps=600)
    return parser.parse_args()


def train(engine: Any, data: Digits, args: argparse.Namespace, traffic: Traffic) -> None:
    """`args.steps` optimizer steps, without accumulation."""
    batch = engine.train_micro_batch_size_per_gpu()
    for step in range(1, args.steps + 1):
        images, labels = data.batch(batch, seed=args.seed, step=step, rank=dist.get_rank())
        loss = F.cross_entropy(engine(images.to(engine.device)), labels.to(engine.device))
        engine.backward(loss)
        engine.step()
        traffic.after_step()
        if step % args.log_every == 0 or step == args.steps:
            line = progress(traffic, step, args.steps, loss.item(), "")
            log_loss(engine, loss.item())
            if dist.get_rank() == 0:
                print(line, flush=True)


def main() -> None:
    """Train, test, report."""
    args = parse_arguments()
    start(args.seed)
    data, model = load(), ConvNet()
    torch.manual_seed(args.seed)
    engine, *_ = ds_sparse.initialize(
        args=args,
        model=model,
        model_parameters=model.parameters(),
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: 1 - step / (args.steps + 1)),
    )
    traffic = Traffic(engine)
    train(engine, data, args, traffic)
    engine.eval()
    score = accuracy(engine, data.test, engine.device)
    write_result(args.result, {"accuracy": score, "steps": args.steps, "seed": args.seed, **traffic.summary()})
    if dist.get_rank() == 0:
        print(f"accuracy {score:.2f} % after {args.steps} steps", flush=True)
    finish()


if __name__ == "__main__":
    main()
