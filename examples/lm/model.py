"""A small decoder-only transformer without biases.

Nearly all of its parameters are matrices, so that density means what it says: the only one-dimensional parameters
are the gains of the normalisations, 0.1 % of the whole.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  (the name that every PyTorch reader knows)
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model; the defaults make 1.3 million parameters."""

    vocabulary: int = 256
    context: int = 128
    layers: int = 4
    heads: int = 5
    width: int = 160


class RMSNorm(nn.Module):
    """Scale every vector to unit root-mean-square, then by a learned gain."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., width), same shape out."""
        return F.rms_norm(x, self.gain.shape, self.gain)


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, length, width), same shape out."""
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width / heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each on a normalised residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, length, width), same shape out."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Token and position embeddings, blocks, a linear head; `forward` returns the mean cross-entropy."""

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__()
        config = config or GPTConfig()
        if config.width % config.heads:
            raise ValueError(f"width must be a multiple of heads, got width {config.width} and heads {config.heads}")
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features))
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, Block):
            # `apply` visits children first. The two branches that write to the residual stream start small, so that
            # the stream does not grow with depth.
            for branch in (module.attention.out, module.down):
                branch.weight.data.mul_(1 / math.sqrt(2 * self.config.layers))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of predicting `targets` from `tokens`, both (batch, length) int64."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))  # (batch, length, vocabulary)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
