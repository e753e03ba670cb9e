"""A DeepSpeed script that knows nothing of compressed communication: `ds_sparse.run` switches it on from outside.

    deepspeed --num_gpus 2 --module ds_sparse.run plain_deepspeed.py --deepspeed --deepspeed_config ds_config.json
    torchrun --nproc-per-node 2 -m ds_sparse.run plain_deepspeed.py --deepspeed --deepspeed_config ds_config.json
"""

import argparse

import deepspeed
import torch


def main() -> None:
    """Learn the sines of random numbers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--local_rank", type=int)
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.Tanh(), torch.nn.Linear(256, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(args=args, model=model, optimizer=optimizer)

    torch.manual_seed(engine.global_rank)
    for _ in range(args.steps):
        inputs = torch.randn(engine.train_micro_batch_size_per_gpu(), 32, device=engine.device)
        loss = torch.nn.functional.mse_loss(engine(inputs), inputs.sin())
        engine.backward(loss)
        engine.step()
    if engine.global_rank == 0:
        print(f"loss {loss.item():.4f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
