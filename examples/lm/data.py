"""Text that every machine has: the sources of the Python standard library, one token a byte."""

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# Tests, generated tables and bundled third-party code: long, repetitive, or not on every machine.
SKIPPED = frozenset(
    {"__pycache__", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages", "dist-packages"}
    | {"test", "tests", "turtledemo"}
)


@dataclass(frozen=True)
class Corpus:
    """Bytes for training and for validation, from different files; each a one-dimensional uint8 array."""

    train: np.ndarray
    validation: np.ndarray


def load_corpus(root: Path | None = None) -> Corpus:
    """Read all Python sources below `root` (the standard library by default), a tenth of the files for validation.

    A file's side of the split depends on its name alone, so one file more or less moves no other.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED.isdisjoint(name.parts):
            held_out = zlib.crc32(name.as_posix().encode()) % 10 == 0
            parts[held_out].append(path.read_bytes())
    if not parts[False] or not parts[True]:
        raise FileNotFoundError(f"too few Python sources below {root}; the corpus is the standard library's .py files")
    train, validation = (np.frombuffer(b"\n".join(parts[side]), dtype=np.uint8) for side in (False, True))
    return Corpus(train, validation)


def windows(text: np.ndarray, starts: np.ndarray, context: int) -> tuple[Tensor, Tensor]:
    """Tokens and next tokens, each (len(starts), context) int64, of the windows that begin at `starts`."""
    rows = torch.from_numpy(text[starts[:, None] + np.arange(context + 1)].astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


def train_batch(
    text: np.ndarray, batch: int, context: int, *, seed: int, step: int, rank: int = 0
) -> tuple[Tensor, Tensor]:
    """A random batch named by (seed, step, rank): the same on every run, different on every rank and step."""
    rng = np.random.default_rng((seed, step, rank))
    return windows(text, rng.integers(0, len(text) - context, size=batch), context)


def validation_batches(
    text: np.ndarray, count: int, batch: int, context: int, *, rank: int = 0, world: int = 1
) -> list[tuple[Tensor, Tensor]]:
    """`count` evenly spaced windows in batches; rank r of `world` gets every world-th of them, from the r-th on.

    The windows are the same for every seed and every number of ranks, provided `count` is a multiple of `world`.
    """
    if count % world:
        raise ValueError(f"count must be a multiple of the number of ranks, got {count} and {world}")
    starts = np.linspace(0, len(text) - context - 1, count).astype(np.int64)[rank::world]
    return [windows(text, starts[i : i + batch], context) for i in range(0, len(starts), batch)]
