"""Scikit-learn's handwritten digits and a small convolutional net: what the digits example trains."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (the name that every PyTorch reader knows)
from sklearn.datasets import load_digits
from torch import Tensor, nn


class ConvNet(nn.Module):
    """Three 3x3 convolutions and a linear layer, for 8x8 images; 61,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.conv3 = nn.Conv2d(64, 64, 3, padding=1)
        self.head = nn.Linear(64 * 2 * 2, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Images (batch, 1, 8, 8) to logits (batch, 10)."""
        x = F.relu(self.conv1(images))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.max_pool2d(F.relu(self.conv3(x)), 2)
        return self.head(x.flatten(1))


@dataclass(frozen=True)
class Digits:
    """Images (count, 1, 8, 8) in [0, 1] and labels (count,), for training and for testing."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    def batch(self, size: int, *, seed: int, step: int, rank: int = 0) -> tuple[Tensor, Tensor]:
        """A random training batch named by (seed, step, rank)."""
        images, labels = self.train
        rows = torch.from_numpy(np.random.default_rng((seed, step, rank)).integers(0, len(labels), size))
        return images[rows], labels[rows]


def load() -> Digits:
    """Every third digit is for testing (599), the others for training (1198): the same split for every seed."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(data.target, dtype=torch.int64)
    held_out = torch.arange(len(labels)) % 3 == 0
    return Digits((images[~held_out], labels[~held_out]), (images[held_out], labels[held_out]))


def accuracy(model: nn.Module, data: tuple[Tensor, Tensor], device: torch.device | None = None) -> float:
    """Share of right answers, in percent."""
    images, labels = data
    with torch.no_grad():
        return 100 * float((model(images.to(device)).argmax(1).cpu() == labels).float().mean())
