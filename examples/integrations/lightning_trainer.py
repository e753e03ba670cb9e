"""Lightning with its DeepSpeed strategy: `ds_sparse.install()` is the one line that is added.

    torchrun --nproc-per-node 2 lightning_trainer.py --devices 2 --config ds_config.json
"""

import argparse

import lightning
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch.utils.data import DataLoader, TensorDataset

import ds_sparse


class Sines(lightning.LightningModule):
    """Learns the sines of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.Tanh(), torch.nn.Linear(256, 32))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """The loss of one micro batch."""
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.net(inputs), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer that DeepSpeed drives."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="ds_config.json")
    parser.add_argument("--devices", type=int, default=1, help="of this node")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", default="runs/integrations", help="folder of logs and checkpoints")
    args = parser.parse_args()

    ds_sparse.install()
    lightning.seed_everything(0)
    inputs = torch.randn(4096, 32)
    trainer = lightning.Trainer(
        strategy=DeepSpeedStrategy(config=args.config),
        devices=args.devices,
        max_steps=args.steps,
        default_root_dir=args.output,
        log_every_n_steps=10,
    )
    trainer.fit(Sines(), DataLoader(TensorDataset(inputs, inputs.sin()), batch_size=4))
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['loss'].item():.4f}")


if __name__ == "__main__":
    main()
