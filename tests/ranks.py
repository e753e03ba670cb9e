"""Runs a function on several forked gloo ranks: torch and DeepSpeed are imported once, in the parent."""

from __future__ import annotations

import datetime
import functools
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_SECONDS = 120  # of a whole run; a healthy one takes 1-5 s, more when the machine is busy

_fork = multiprocessing.get_context("fork")


class RankError(AssertionError):
    """Some rank raised; the message holds its traceback. `types` are the names of what each rank raised."""

    def __init__(self, failures: dict[int, tuple[str, str]]) -> None:
        self.types = {rank: kind for rank, (kind, _) in failures.items()}
        super().__init__("\n".join(f"--- rank {rank}\n{text}" for rank, (_, text) in failures.items()))


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = TIMEOUT_SECONDS,
    group_timeout: float = TIMEOUT_SECONDS,
    enter: Callable[[int], None] | None = None,
) -> list[Any]:
    """`function(*args)` on each of `world` ranks with an initialised gloo group; returns the results by rank.

    Args:
        timeout: seconds for the whole run.
        group_timeout: seconds after which a collective that waits in vain raises.
        enter: called on each rank with its number, before it joins the group: may change its surroundings, as the
            environment that makes all ranks one node.

    Raises:
        RankError: a rank raised, died, or did not finish in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        join = functools.partial(_join, world, folder, group_timeout, enter)
        pipes = [_fork.Pipe(duplex=False) for _ in range(world)]
        ranks = [
            _fork.Process(target=_rank, args=(rank, join, pipes[rank][1], function, args), daemon=True)
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for _, sender in pipes:
            sender.close()
        deadline = time.monotonic() + timeout
        answers = [_receive(receiver, deadline) for receiver, _ in pipes]
        for process in ranks:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
    failures = {rank: answer[1:] for rank, answer in enumerate(answers) if answer[0] == "error"}
    if failures:
        raise RankError(failures)
    return [answer[1] for answer in answers]


def _receive(receiver: Any, deadline: float) -> tuple[Any, ...]:
    if not receiver.poll(max(0.0, deadline - time.monotonic())):
        return "error", "TimeoutError", "did not finish in time"
    try:
        return pickle.loads(receiver.recv_bytes())
    except EOFError:
        return "error", "EOFError", "died without a word"


def _send(sender: Any, *answer: Any) -> None:
    # Plain pickle: torch's own would share memory that is gone when the rank ends.
    sender.send_bytes(pickle.dumps(answer))


def _rank(rank: int, join: Callable[[int], None], sender: Any, function: Callable[..., Any], args: Any) -> None:
    try:
        join(rank)
        result = function(*args)
        dist.barrier()
        dist.destroy_process_group()
        _send(sender, "result", result)
    except BaseException as error:
        _send(sender, "error", type(error).__name__, traceback.format_exc())
    finally:
        sender.close()


def _join(world: int, folder: str, group_timeout: float, enter: Callable[[int], None] | None, rank: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29999",
    )  # fmt: skip
    os.environ.pop("CROSS_RANK", None)
    if enter is not None:
        enter(rank)
    torch.manual_seed(0)
    store = dist.FileStore(os.path.join(folder, "store"), world)
    timeout = datetime.timedelta(seconds=group_timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
