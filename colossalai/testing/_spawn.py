"""``spawn``: run a function on several ranks of this machine, quickly and without a rank left behind.

Ranks are forked from a server process that has already imported torch (8 ranks start in about 0.4 s, while
``spawn`` of the standard library takes half a minute).  The parent hosts the rendezvous store on a port the
system chose, so no port is guessed, freed and taken by somebody else in between.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch.distributed import TCPStore

DEFAULT_TIMEOUT = 60.0


class RankError(RuntimeError):
    """A rank raised, died or was stuck; the message holds its traceback."""


def spawn(
    func: Callable[..., None], nprocs: int = 1, *, timeout: float = DEFAULT_TIMEOUT, **kwargs: Any
) -> None:
    """Call ``func(rank=..., world_size=..., port=..., **kwargs)`` on ``nprocs`` ranks and wait for all.

    ``func`` must be a function of a module (or a ``functools.partial`` of one).  ``timeout`` is in seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["colossalai.testing._forkserver_preload"])
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout)
    )
    ranks = []
    for rank in range(nprocs):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_run_rank, args=(sender, func, rank, nprocs, store.port, kwargs), daemon=True
        )
        process.start()
        sender.close()
        ranks.append((process, receiver))
    try:
        _wait(ranks, time.monotonic() + timeout)
    finally:
        for process, receiver in ranks:
            process.kill()
            process.join()
            receiver.close()


def _run_rank(
    sender: Connection,
    func: Callable[..., None],
    rank: int,
    world_size: int,
    port: int,
    kwargs: dict[str, Any],
) -> None:
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = (
        "True"  # the parent hosts the store: rank 0 must not bind the port
    )
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    torch.set_num_threads(1)
    try:
        func(rank=rank, world_size=world_size, port=port, **kwargs)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        sender.send(None)
    except BaseException:
        sender.send(traceback.format_exc())
        raise SystemExit(1) from None


def _wait(ranks: list[tuple[Any, Connection]], deadline: float) -> None:
    pending = dict(enumerate(ranks))
    while pending:
        ready = wait([r for _, r in pending.values()], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(pending)} did not finish in time")
        for rank, (process, receiver) in list(pending.items()):
            if receiver not in ready:
                continue
            try:
                failure = receiver.recv()
            except EOFError:
                process.join()
                raise RankError(f"rank {rank} died with exit code {process.exitcode}") from None
            if failure is not None:
                raise RankError(f"rank {rank} raised:\n{failure}")
            del pending[rank]
