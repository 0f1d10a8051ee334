"""The meeting of the ranks.  It touches no global state, so the ranks of these tests are threads.

What the ranks say to each other is tested over a store in memory, how they connect over real sockets.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import pytest
import torch.distributed as dist

from colossalai.context.rendezvous import DEFAULT_TIMEOUT, Rendezvous, RendezvousError, read_timeout


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def foreign_port() -> Iterator[int]:
    """A port where a program listens that is no store: it accepts and says nothing."""
    with socket.socket() as s:
        s.bind(("", 0))
        s.listen()
        yield int(s.getsockname()[1])


class Name(NamedTuple):
    """The name of a meeting that took place."""

    name: str


Answer = object  # the store or the name of a rank that joined, or the text of its error


def meet(rank: int, world_size: int, port: int, timeout: float = 30.0, host: str = "localhost") -> Answer:
    try:
        return Rendezvous(rank=rank, world_size=world_size, host=host, port=port, timeout=timeout).meet()
    except RendezvousError as error:
        return str(error)


def agree(store: dist.Store, rank: int, world_size: int, plan: str = "", timeout: float = 30.0) -> Answer:
    meeting = Rendezvous(
        rank=rank, world_size=world_size, host="node", port=29500, timeout=timeout, plan=plan
    )
    try:
        return Name(meeting.agree(store, time.monotonic() + timeout))
    except RendezvousError as error:
        return str(error)


def together(*ranks: Callable[[], Answer]) -> list[Answer]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [future.result() for future in [pool.submit(rank) for rank in ranks]]


def store_at(port: int) -> dist.TCPStore:
    return dist.TCPStore(
        "localhost", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
    )


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", socket.gethostname()])
def test_all_ranks_share_one_store(port: int, host: str) -> None:
    stores = together(*(partial(meet, rank, 3, port, host=host) for rank in range(3)))
    assert all(isinstance(store, dist.Store) for store in stores)
    stores[2].set("key", "value")  # type: ignore[attr-defined]
    assert stores[0].get("key") == b"value"  # type: ignore[attr-defined]


def test_a_port_in_use_is_an_error_on_every_rank(foreign_port: int) -> None:
    first, second = together(*(partial(meet, rank, 2, foreign_port, timeout=1.0) for rank in (0, 1)))
    where = f"localhost:{foreign_port}"
    assert f"rank 0 of 2 cannot host the rendezvous at {where}: port {foreign_port} is in use; choose" in str(
        first
    )
    assert f"rank 1 of 2: {where} is open but did not answer as a rendezvous store within 1 s" in str(second)
    assert "another program uses this port: choose another port, on all ranks" in str(second)


def test_nobody_listens(port: int) -> None:
    message = str(meet(1, 2, port, timeout=0.3))
    assert f"rank 1 of 2 found no rank 0 at localhost:{port} within 0.3 s" in message
    assert "check that rank 0 is started and runs on host 'localhost'" in message
    assert "COLOSSALAI_RENDEZVOUS_TIMEOUT" in message


@pytest.mark.parametrize("rank", [0, 1])
def test_an_unknown_host_is_an_error_on_every_rank(port: int, rank: int) -> None:
    message = str(meet(rank, 2, port, timeout=0.3, host="no-such-host.invalid"))
    assert f"rank {rank} of 2 found no rank 0 at no-such-host.invalid:{port} within 0.3 s" in message


def test_missing_ranks_are_named_on_every_rank_that_came() -> None:
    store = dist.HashStore()
    for answer in together(partial(agree, store, 0, 4, timeout=0.5), partial(agree, store, 2, 4)):
        assert "2 of 4 ranks did not join at node:29500 within 0.5 s: rank 1, 3; see whether they" in str(
            answer
        )


def test_a_rank_gives_up_when_rank_0_never_decides() -> None:
    answer = agree(dist.HashStore(), 1, 2, timeout=0.3)
    assert "rank 1 of 2 waited 0.3 s at node:29500 for the other ranks; see whether they failed" in str(
        answer
    )


def test_ranks_that_were_launched_differently_are_told_so() -> None:
    store = dist.HashStore()
    for answer in together(partial(agree, store, 0, 2, "tensor=1"), partial(agree, store, 1, 2, "tensor=2")):
        assert (
            "the ranks at node:29500 were not launched alike: rank 0 with world_size=2, tensor=1, rank 1 with"
            " " in str(answer)
        )
        assert "world_size=2, tensor=2; give all ranks the same config, backend and world size" in str(answer)


def test_a_rank_outside_the_world_of_rank_0() -> None:
    store = dist.HashStore()
    first, second, outside = together(
        partial(agree, store, 0, 2), partial(agree, store, 1, 2), partial(agree, store, 3, 4)
    )
    assert isinstance(first, Name)
    assert first == second
    assert "rank 3 of 4 is not part of the job at node:29500, which rank 0 launched with world_size=2" in str(
        outside
    )


def test_one_rank_given_to_two_processes() -> None:
    store = dist.HashStore()
    store.set("process/1", "process 7 on elsewhere")
    message = str(agree(store, 1, 2))
    assert "rank 1 joined at node:29500 twice: process 7 on elsewhere, then process" in message


def test_one_store_serves_meeting_after_meeting() -> None:
    """The store of an agent outlives a launch: neither its success nor its failure may reach the next."""
    store = dist.HashStore()
    names = set()
    for plans in (("a", "a"), ("a", "b"), ("b", "b"), ("b", "b")):
        first, second = together(*(partial(agree, store, rank, 2, plan) for rank, plan in enumerate(plans)))
        assert first == second
        assert isinstance(first, Name) == (len(set(plans)) == 1)
        names.add(first)
    assert len(names) == 4


def test_a_rank_that_gave_up_is_not_counted_later() -> None:
    store = dist.HashStore()
    agree(store, 1, 2, timeout=0.1)
    assert "1 of 2 ranks did not join at node:29500 within 0.1 s: rank 1" in str(
        agree(store, 0, 2, timeout=0.1)
    )


def test_a_rank_that_met_a_leaving_store_comes_back_to_the_next(port: int) -> None:
    """Rank 1 relaunches while rank 0 still hosts the store of the launch before."""
    leaving = store_at(port)
    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(meet, 1, 2, port)
        leaving.wait(["colossalai/0/rank/1"])
        del leaving
        first = pool.submit(meet, 0, 2, port)
        assert isinstance(first.result(), dist.Store)
        assert isinstance(second.result(), dist.Store)


def test_rank_0_leaves_the_store_to_an_agent(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = store_at(port)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_PORT", str(port))
    assert isinstance(meet(0, 1, port), dist.Store)
    assert isinstance(meet(0, 1, free_port()), dist.Store)  # not the agent's: a port that the user chose
    del agent


def test_the_timeout_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_timeout() == DEFAULT_TIMEOUT == 300
    monkeypatch.setenv("COLOSSALAI_RENDEZVOUS_TIMEOUT", "1.5")
    assert read_timeout() == 1.5
    for wrong in ("soon", "0", "-1", "nan", "inf"):
        monkeypatch.setenv("COLOSSALAI_RENDEZVOUS_TIMEOUT", wrong)
        with pytest.raises(ValueError, match=f"_TIMEOUT must be a positive number of seconds, got '{wrong}'"):
            read_timeout()
