"""A training loop of Accelerate that knows nothing of compressed communication: `ds_sparse.run` switches it on.

    accelerate launch --num_processes 2 --use_deepspeed --deepspeed_config_file ds_config.json \
        --module ds_sparse.run accelerate_loop.py
"""

import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    """Learn the sines of random numbers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()

    accelerator = Accelerator()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.Tanh(), torch.nn.Linear(256, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(4 * args.steps * accelerator.num_processes, 32)
    loader = DataLoader(TensorDataset(inputs, inputs.sin()), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for batch, targets in loader:
        loss = torch.nn.functional.mse_loss(model(batch), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"loss {loss.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
