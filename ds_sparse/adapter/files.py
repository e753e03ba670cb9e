"""Files of one checkpoint: written by all ranks under temporary names, then moved into place by all or by none."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..errors import CheckpointError


class PendingFiles:
    """What this rank has written of a checkpoint that is not complete yet.

    A rank on which something fails goes on, without writing more, to the point where all ranks meet: one that raised
    alone would leave the others waiting for it.

    Args:
        what: is being saved, for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._failure = ""
        self._moves: dict[Path, Path] = {}

    def attempt(self, path: str | Path, action: Callable[[], Any]) -> None:
        """Does `action` on `path`, unless something failed before; notes it when it fails."""
        if self._failure:
            return
        try:
            action()
        except Exception as error:  # DeepSpeed's writers raise OSError, RuntimeError and what pickle raises
            self._failure = f"{path}: {type(error).__name__}: {error}"

    def write(self, path: str | Path, writer: Callable[[Path], Any]) -> None:
        """Has `writer` write what will be found at `path` once all files are in place."""
        target = Path(path)
        # A name of its own kind: tools that look for a checkpoint's files by prefix or suffix must not find it. And of
        # this rank: disks that are said to be each node's own may be one.
        partial = self._moves[target] = target.with_name(f".{target.name}.{dist.get_rank()}.partial")

        def write() -> None:
            target.parent.mkdir(parents=True, exist_ok=True)
            writer(partial)
            _sync(partial)

        self.attempt(target, write)

    def commit(self) -> None:
        """Moves all files of all ranks into place, or removes them. A collective.

        Raises:
            CheckpointError: on all ranks, when some rank could not do its part. If that was before the first file was
                moved, what had stood at the same paths is untouched.
        """
        self.agree()
        for target, partial in self._moves.items():
            self.attempt(target, functools.partial(os.replace, partial, target))
        for folder in {target.parent for target in self._moves}:
            self.attempt(folder, functools.partial(_sync, folder))
        self.agree()
        self._moves.clear()

    def agree(self) -> None:
        """Raises on all ranks when something failed on one. A collective."""
        failures = by_rank(self._failure)
        if failures:
            self.discard()
            raise CheckpointError(
                f"{self._what} was not saved, {failures}. What was saved before is still there. What to "
                f"do: see to the cause (a full disk, a folder that cannot be written) and save again."
            )

    def discard(self) -> None:
        """Removes what was not moved into place, as far as that goes."""
        for partial in self._moves.values():
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
        self._moves.clear()


def everywhere(mine: Any) -> list[Any]:
    """What each rank gave. A collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def by_rank(failure: str) -> str:
    """What failed, on which ranks; empty when nothing did. A collective."""
    return "; ".join(f"on rank {rank}: {theirs}" for rank, theirs in enumerate(everywhere(failure)) if theirs)


def _sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
