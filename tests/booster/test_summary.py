"""``colossalai.utils.summary``: what each plan keeps of a model on this rank, asked by one rank alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import colossalai
import colossalai.nn as col_nn
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from colossalai.booster.summary import ModelSummary
from colossalai.core import global_context as gpc
from colossalai.pipeline import split_model
from colossalai.testing import spawn
from colossalai.utils import summary
from tests.booster.plans import batches, launch, loss_of, mlp

MLP = 6 * 16 + 16 + 16 * 8 + 8 + 8 * 3 + 3


class Tied(nn.Module):
    """A model with a shared weight, a buffer, a frozen part and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.table = nn.Embedding(10, 4)
        self.body = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.table.weight


def test_table_of_a_plain_model() -> None:
    told = summary(Tied())
    rows = {row.path: row for row in told.modules}
    assert list(rows) == ["", "table", "body.0", "body.1", "head"]
    assert rows["head"].plan() == "weight: tied to table.weight"
    assert (rows["head"].parameters, rows["head"].nbytes) == (0, 0)
    assert rows["body.1"].parameters == rows["body.1"].here == 8
    assert rows["body.1"].nbytes == 4 * 16 + 8, "with the buffers"
    total = told.total
    assert (total.parameters, total.trained) == (1 + 40 + 20 + 8, 1 + 40 + 8)
    head, rule, columns, _, *body, end = str(told).splitlines()
    assert head == "Tied"
    assert set(rule) == {"-"}
    assert columns.split() == ["module", "type", "parameters", "here", "memory", "dtype", "tier", "plan"]
    assert body[1].split() == [
        *["table", "Embedding", "40", "40", "160", "B", "float32", "cpu"],
        *["weight", "10", "x", "4:", "whole"],
    ]
    assert end == "49 parameters are trained, 20 are frozen"


def test_depth_adds_up() -> None:
    told = summary(Tied(), depth=1)
    assert [row.path for row in told.modules] == ["", "table", "body", "head"]
    body = told.modules[2]
    assert (body.kind, body.parameters, body.plan()) == ("Sequential", 28, "whole")
    assert told.total.nbytes == summary(Tied()).total.nbytes


def test_a_model_without_memory() -> None:
    with torch.device("meta"):
        total = summary(mlp()).total
    assert (total.parameters, total.here, total.nbytes) == (MLP, 0, 0)


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match=r"summary describes a torch.nn.Module, got list"):
        summary([mlp()])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"depth of at least 1, or None for every module, got 0"):
        summary(mlp(), depth=0)


def _after_a_step(plugin: Any) -> nn.Module:
    model = mlp()
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    loss = loss_of(model, batches([4])[0])
    booster.backward(loss, optimizer)
    optimizer.step()
    model(batches([4])[0][0])  # FSDP2 leaves weights gathered now
    return model


def _check(told: ModelSummary, here: int, plan: str, tier: str = "cpu", size: int = 4) -> None:
    total = told.total
    assert total.parameters == MLP, told
    assert total.here == here, told
    assert total.nbytes == size * total.here
    assert {t.plan for row in told.modules for t in row.tensors} == {plan}, told
    assert {t.tier for row in told.modules for t in row.tensors} == {tier}
    assert told.modules[0].tensors[0].shape == (16, 6)


def _replicas(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    small = {"min_chunk_size_mb": 64 * 4 / 1024**2, "search_range_mb": 64 * 4 / 1024**2}
    plans = {
        "ddp": TorchDDPPlugin(),
        "zero": LowLevelZeroPlugin(stage=2, precision="bf16"),
        "fsdp": TorchFSDPPlugin(),
        "gemini": GeminiPlugin(device="cpu", precision="fp32", placement_policy="cpu", **small),
    }
    models = {name: _after_a_step(plugin) for name, plugin in plans.items()}
    if rank == 0:  # the other one does not take part
        _check(summary(models["ddp"]), MLP, "whole")
        _check(summary(models["zero"]), MLP, "states cut over 2 ranks", size=2)
        half = 8 * 6 + 8 + 4 * 16 + 4 + 2 * 8 + 2  # of three rows the first rank has two
        _check(summary(models["fsdp"]), half, "cut by FSDP over 2 ranks")
        told = summary(models["gemini"])
        assert all("which 2 ranks share" in t.plan for row in told.modules for t in row.tensors)
        assert 0 < told.total.here < MLP
        assert told.total.parameters == MLP
    torch.distributed.barrier()
    gpc.destroy()
    _pieces(rank, world_size, port)


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 16, "n_positions": 8}
    return GPT2LMHeadModel(GPT2Config(**sizes, tie_word_embeddings=False))


def _pieces(rank: int, world_size: int, port: int) -> None:
    tensor = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}
    colossalai.launch(tensor, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    model = nn.Sequential(col_nn.Linear(6, 16), nn.Tanh(), col_nn.Linear(16, 8))
    if rank == 0:
        told = summary(model)
        first, last = told.modules
        assert (first.parameters, first.here) == (6 * 16 + 16, (6 * 16 + 16) // 2)
        assert (last.parameters, last.here) == (16 * 8 + 8, 16 * 8 // 2 + 8)
        assert first.tensors[0].shape == (16, 6), "as the serial model has it"
        assert first.tensors[0].plan.startswith("cut [")
        assert last.tensors[1].plan == "whole"
        assert "on rank 0 (" in told.title
    gpc.destroy()
    stages = {"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 2}
    colossalai.launch(stages, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    serial = _gpt2()
    names, total = set(dict(serial.named_parameters())), sum(p.numel() for p in serial.parameters())
    told = summary(split_model(serial))
    counts = [torch.zeros(1, dtype=torch.long) for _ in range(2)]
    torch.distributed.all_gather(counts, torch.tensor([told.total.parameters]))
    assert sum(counts).item() == total, told
    assert 0 < told.total.here == told.total.parameters < total
    mine = {f"{row.path}.{t.name}" for row in told.modules for t in row.tensors if t.is_parameter}
    assert mine < names, "names of the serial model"
    assert f"pp {rank} of 2" in told.title


def test_plans_of_two_ranks() -> None:
    pytest.importorskip("transformers")
    spawn(_replicas, 2)
