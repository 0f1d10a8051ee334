"""Gemini: page 8's booster, page 42's tensor parallelism x ZeRO, and page 40's example without a GPU."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import colossalai
from colossalai.booster import Booster
from colossalai.nn.optimizer import HybridAdam
from colossalai.tensor import (
    ColoInitContext,
    ColoParameter,
    ComputePattern,
    ComputeSpec,
    ProcessGroup,
    ReplicaSpec,
    ShardSpec,
)
from colossalai.testing import spawn
from colossalai.utils import get_current_device
from colossalai.zero import GeminiAdamOptimizer, ZeroDDP
from colossalai.zero.gemini import GeminiDDP, GeminiManager, GeminiOptimizer, init_chunk_manager
from tests.documents.pages import code
from tests.documents.scripts import install, run

ROWS, LENGTH, WORDS = 4, 8, 38
# small, and without dropout, whose masks differ from rank to rank
SMALL = (
    "hidden_size=1024, num_layers=24, num_attention_heads=16",
    "hidden_size=16, num_layers=2, num_attention_heads=4",
)
SHORT = (
    ("max_seq_len=1024", f"max_seq_len={2 * LENGTH}"),
    ("vocab_size=50257", f"vocab_size={WORDS}"),
    SMALL,
)
NO_DROPOUT = (
    "vocab_size=vocab_size)",
    "vocab_size=vocab_size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)",
)
# chunks of a few parameters, and losses that can be compared
EXACT = ("search_range_mb=32", "search_range_mb=0.002, min_chunk_size_mb=0.002, dtype=torch.float32")


def launch(rank: int, world_size: int, port: int) -> None:
    colossalai.launch({}, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)


def check_page_8(rank: int, world_size: int, port: int) -> None:
    install()
    launch(rank, world_size, port)
    torch.manual_seed(rank)
    names = run(code("08.usage", ("criterion)\n)", "criterion)")), HybridAdam=HybridAdam)
    model, optimizer = names["model"], names["optimizer"]
    assert isinstance(model, GeminiDDP)
    assert isinstance(optimizer, GeminiOptimizer)
    assert isinstance(names["booster"], Booster)
    assert optimizer.loss_scale == 2**5
    assert model.gemini_manager.policy_name == "cuda"
    before = model.state_dict(only_rank_0=False)
    loss = names["criterion"](model(torch.randn(2, 3, 32, 32, device=get_current_device())))
    names["booster"].backward(loss, optimizer)
    optimizer.step()
    after = model.state_dict(only_rank_0=False)
    assert not torch.equal(before["fc.bias"], after["fc.bias"])


@pytest.mark.parametrize("world_size", [1, 2])
def test_page_8(world_size: int) -> None:
    spawn(check_page_8, world_size)


def script(*changes: tuple[str, str]) -> dict[str, Any]:
    """Page 42 up to its main function."""
    from packaging import version
    from transformers import GPT2Config, GPT2LMHeadModel

    return run(
        code("42.model", *SHORT, NO_DROPOUT),
        code("42.loss"),
        code("42.tensor_parallelize"),
        code("42.gemini", *changes),
        code("42.data", ("torch.cuda.current_device()", "get_current_device()")),
        **{name: value for name, value in globals().items() if name[0] != "_"},
        GPT2Config=GPT2Config,
        GPT2LMHeadModel=GPT2LMHeadModel,
        version=version,
    )


def serial_losses(names: dict[str, Any], batches: list[Tensor]) -> list[float]:
    torch.manual_seed(123)
    model: nn.Module = names["gpt2_medium"]()
    optimizer = HybridAdam(model.parameters(), lr=1e-3)
    losses = []
    for ids in batches:
        optimizer.zero_grad()
        loss = names["GPTLMLoss"]()(model(ids, torch.ones_like(ids)), ids)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def random_batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(WORDS, (ROWS, LENGTH), generator=generator) for _ in range(count)]


def check_page_42(rank: int, world_size: int, port: int, tp: int, placement: str, shardinit: bool) -> None:
    """Every data-parallel rank takes its rows; the losses are those of the serial model."""
    names = script(EXACT)
    batches, got = random_batches(4), []
    replicas = world_size // tp
    ids = iter([b.chunk(replicas)[rank // tp] for b in batches])
    main = code(
        "42.main",
        ("NUM_STEPS = 10", f"NUM_STEPS = {len(batches)}"),
        ("colossalai.launch_from_torch(config={})", "launch(rank, world_size, port)"),
        ("torch.cuda.synchronize()", "None"),
        ("        optimizer.step()", "        optimizer.step()\n        losses.append(loss.detach())"),
    )
    args = argparse.Namespace(tp_degree=tp, placement=placement, shardinit=shardinit)

    def data(*sizes: int) -> tuple[Tensor, Tensor]:
        own = next(ids).to(get_current_device())
        return own, torch.ones_like(own)

    names |= {
        "parse_args": lambda: args,
        "get_data": data,
        "losses": got,
        "get_tflops": max,
        "partial": partial,
    }
    run(main, "main()", **{**names, "rank": rank, "world_size": world_size, "port": port, "launch": launch})
    total = torch.stack(got).cpu()
    dist.all_reduce(total)
    expected = torch.tensor(serial_losses(names, batches))
    torch.testing.assert_close(total / world_size, expected, rtol=1e-4, atol=1e-4)
    assert expected[-1] < expected[0]


@pytest.mark.parametrize(
    ("world_size", "tp", "placement", "shardinit"),
    [(2, 2, "cpu", True), (4, 2, "auto", False), (2, 1, "cuda", False)],
)
def test_page_42(world_size: int, tp: int, placement: str, shardinit: bool) -> None:
    pytest.importorskip("transformers")
    spawn(check_page_42, world_size, tp=tp, placement=placement, shardinit=shardinit)


def check_by_hand(rank: int, world_size: int, port: int) -> None:
    """The blocks before the script, the block of older versions, and data that the page draws."""
    launch(rank, world_size, port)
    names = script(
        ("colossalai.__version__", "'0.1.10'"),
        # as written, the manager is made before what it manages
        ("        gemini_manager = GeminiManager(placement_policy, chunk_manager)\n", ""),
        (
            "        model = ZeroDDP",
            "        gemini_manager = GeminiManager(placement_policy, chunk_manager)\n"
            "        model = ZeroDDP",
        ),
    )
    ids, mask = names["get_data"](ROWS, LENGTH, WORDS)
    names |= {
        "input_ids": ids,
        "attn_mask": mask,
        "criterion": names["GPTLMLoss"](),
        "default_dist_spec": None,
    }
    pg = ProcessGroup(tp_degree=1)
    names = run(code("42.context"), **{**names, "default_pg": pg})
    model = names["gemini_zero_dpp"](names["model"], pg, "cpu")
    names = run(code("42.optimizer"), code("42.step"), **{**names, "model": model})
    assert isinstance(model, ZeroDDP)
    assert model.chunk_manager.ranks.size == world_size
    assert names["loss"].isfinite()
    sizes = {"hidden_dim": 16, "search_range_mb": 1, "min_chunk_size_mb": 1, "device": "cpu"}
    module = names["gpt2_medium"]()
    made = run(code("42.managers"), module=module, placement_policy="cpu", **{**names, **sizes})
    assert ZeroDDP(module, made["gemini_manager"]).chunk_manager.ranks.size == world_size
    with pytest.raises(ValueError, match=r"enable_distributed_storage=False asks for"):
        type(made["chunk_manager"])(1024, pg, enable_distributed_storage=False)
    with pytest.raises(ValueError, match=r"search_range at least 0 and n_grids at least 1, got 1 and 0"):
        type(made["chunk_manager"]).search_chunk_size(module, 1, 0)
    with ColoInitContext(default_pg=pg):
        one = nn.Linear(2, 2)
    with ColoInitContext(default_pg=ProcessGroup(tp_degree=world_size)):
        two = nn.Linear(2, 2)
    with pytest.raises(
        ValueError, match=r"of Sequential belong to 2 process groups; chunks need one for all"
    ):
        GeminiDDP(nn.Sequential(one, two))


def test_page_42_by_hand() -> None:
    pytest.importorskip("transformers")
    spawn(check_by_hand, 2)


__all__ = [
    "ColoParameter",
    "ComputePattern",
    "ComputeSpec",
    "GeminiAdamOptimizer",
    "GeminiManager",
    "ReplicaSpec",
    "ShardSpec",
    "init_chunk_manager",
]  # what the blocks use
