"""``colossalai.utils.checkpoint_io``: save, load, merge and redist, between ranks and the serial model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colossalai.checkpoint_io.runs.manifest import read_manifest
from colossalai.tensor import ProcessGroup, full_state_dict, post_process_colo_init_ctx
from colossalai.testing import spawn
from colossalai.utils.checkpoint_io import (
    ParamDistMeta,
    ParamRedistMeta,
    PipelineRedistMeta,
    RankRedistMeta,
    RedistMeta,
    load,
    merge,
    redist,
    save,
)
from tests.tensor.net import build, lay_out, loss
from tests.tensor.world import start


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 10, (4, 6), generator=generator) for _ in range(3)]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Tensor]) -> float:
    for ids in data:
        optimizer.zero_grad()
        value = loss(model, ids)
        value.backward()
        optimizer.step()
    return value.item()


def under(plan: str, tp: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build()
    post_process_colo_init_ctx(model)
    lay_out(model, ProcessGroup(tp_degree=tp), plan)
    return model, adam(model)


def blank(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(9.0)
    return model


def plan_of_rows(names: list[str], parts: int, ranks: int) -> RedistMeta:
    """Parameters cut along their first dim, on ``parts`` neighbours of ``ranks``."""
    return RedistMeta(
        {n: {r: RankRedistMeta(r // parts, r % parts, 0) for r in range(ranks)} for n in names},
        [PipelineRedistMeta(set(names))],
        {n: ParamRedistMeta(ranks // parts, parts, [0], [parts]) for n in names},
    )


def _round_trips(rank: int, world_size: int, port: int, folder: str) -> None:
    """From a plan to files, to whole tensors, to another plan; training goes on as it would have."""
    start(rank, world_size, port)
    root = Path(folder)
    model, optimizer = under("megatron", 2)
    first, *rest = batches()
    train(model, optimizer, [first])
    save(root / "saved", model, optimizer, max_shard_size_gb=1e-6, epoch=3, note="mine")
    with pytest.raises(FileExistsError, match="saved is not empty; pass overwrite=True"):
        save(root / "saved", model, optimizer)
    save(root / "saved", model, optimizer, overwrite=True, epoch=3, note="mine")
    expected_state = {n: v.clone() for n, v in full_state_dict(model).items()}
    expected = train(model, optimizer, rest)
    merge(root / "saved", root / "merged")
    metas = plan_of_rows(["up.weight", "down.weight", "table.weight"], 2, world_size)
    redist(root / "saved", root / "rows", metas, [{}])
    for name in ("saved", "merged", "rows"):
        for plan, tp in (("hidden", 2), ("nothing", 1)):
            model, optimizer = under(plan, tp)
            before = torch.random.get_rng_state()
            extra = load(root / name, blank(model), optimizer)
            assert extra == {"epoch": 3, "note": "mine"}
            assert torch.equal(before, torch.random.get_rng_state())
            for key, value in full_state_dict(model).items():
                assert torch.equal(value, expected_state[key]), f"{name}, {plan}: {key}"
            assert train(model, optimizer, rest) == pytest.approx(expected, rel=1e-5)
    _cut_by_hand(rank, root)


class Mine(nn.Module):
    """A rank's part of a layer that a script has cut itself, and a part that all ranks have."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())

    def step(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0, momentum=0.5)
        for p in self.parameters():
            p.grad = p.detach().clone()
        optimizer.step()
        return optimizer


WEIGHT, BIAS = torch.arange(24.0).view(4, 6), torch.arange(4.0)


def _cut_by_hand(rank: int, root: Path) -> None:
    def meta(dim: int, parts: int = 2) -> dict[str, ParamDistMeta]:
        return {"weight": ParamDistMeta(0, 1, rank, 2, [dim], [parts]), "bias": ParamDistMeta(rank, 2, 0, 1)}

    mine = Mine(WEIGHT.chunk(2, 1)[rank], BIAS)
    optimizer = mine.step()
    save(root / "hand", mine, optimizer, {"weight": 0, "bias": 1}, meta(-1))
    assert not hasattr(mine.weight, "placement")  # the description is gone
    assert read_manifest(root / "hand").tensors["model/weight"].shape == (4, 6)
    plan = RedistMeta(
        {"weight": {r: RankRedistMeta(0, r, 0) for r in range(2)}},
        param_meta={"weight": ParamRedistMeta(1, 2, [0], [2])},
    )
    other = Mine(torch.zeros(2, 6), torch.zeros(4))
    again = other.step()
    load(root / "hand", other, again, plan, [meta(-1), meta(-1)])
    assert torch.equal(other.weight, torch.zeros(4, 6).chunk(2)[rank])  # w - lr * w
    assert torch.equal(again.state[other.weight]["momentum_buffer"], WEIGHT.chunk(2)[rank])
    assert torch.equal(again.state[other.bias]["momentum_buffer"], BIAS)
    bad: list[tuple[dict[str, Any], type[Exception], str]] = [
        (
            {"dist_meta": {"wait": meta(0)["weight"]}},
            ValueError,
            "'wait' is described, which the model does not",
        ),
        ({"dist_meta": meta(0, 3)}, ValueError, "cut one dim, into as many pieces as there are of them"),
        ({"dist_meta": meta(5)}, ValueError, r"tp_shard_dims=\[5\], which it lacks"),
        ({"dist_meta": {"weight": ParamDistMeta(0, 1, 0, 1, zero_numel=3)}}, ValueError, "as a flat part"),
        ({"dist_meta": {"weight": 3}}, TypeError, "is described by a ParamDistMeta, got int"),
        ({"param_to_os": {"wait": 0}}, ValueError, "param_to_os names 'wait'"),
        ({"backend": "s3"}, ValueError, "backend='disk'; got 's3'"),
        ({"max_shard_size_gb": -1}, ValueError, "max_shard_size_gb is a number of GB"),
        (
            {"dist_meta": {"weight": ParamDistMeta(0, 1, 0, 2, [0], [2])}},
            Exception,
            "weight",
        ),  # all have piece 0
    ]
    with pytest.raises(ValueError, match=r"'up.weight' lies in 1 pieces, but is described as lying in 2"):
        save(root / "bad", under("nothing", 1)[0], dist_meta={"up.weight": meta(0)["weight"]})
    for options, kind, message in bad:
        with pytest.raises(kind, match=message):
            save(root / "bad", mine, optimizer, **options)
    assert not (root / "bad").exists() or not any((root / "bad").iterdir())
    forgotten = r"ranks 0 and 1 hold .* 'weight', of shape \(4, 3\), with different .*: dist_meta=\{'weight'"
    with pytest.raises(ValueError, match=forgotten):
        save(root / "bad", Mine(WEIGHT.chunk(2, 1)[rank], BIAS))
    uneven = Mine(torch.arange(5.0).chunk(2)[rank], BIAS)
    with pytest.raises(ValueError, match=r"'weight' .* \(3,\) on rank 0 and \(2,\) on rank 1. .* cut evenly"):
        save(root / "bad", uneven, dist_meta={"weight": meta(0)["weight"]})
    assert not (root / "bad").exists() or not any((root / "bad").iterdir())
    drifted = Mine(WEIGHT * (1 + 1e-6 * rank), BIAS)  # copies that differ by rounding, and a buffer
    drifted.register_buffer("statistics", torch.full((2,), float(rank)))
    save(root / "drifted", drifted)
    if rank == 0:  # one rank alone is wrong, and all refuse
        with pytest.raises(ValueError, match="'wait' is described"):
            save(root / "bad", mine, dist_meta={"wait": meta(0)["weight"]})
    else:
        with pytest.raises(RuntimeError, match=r"rank 0 could not .* 'wait' is described"):
            save(root / "bad", mine)


def test_round_trips(tmp_path: Path) -> None:
    spawn(_round_trips, 2, folder=str(tmp_path))
    serial = build()
    optimizer = adam(serial)
    first, *rest = batches()
    train(serial, optimizer, [first])
    expected = {n: v.clone() for n, v in serial.state_dict().items()}
    last = train(serial, optimizer, rest)
    merge(tmp_path / "rows", tmp_path / "merged again")  # in one process
    boxes = {
        name: {n: len(t.boxes) for n, t in read_manifest(tmp_path / name).tensors.items()}
        for name in ("saved", "merged", "merged again", "rows")
    }
    assert set(boxes["merged"].values()) == set(boxes["merged again"].values()) == {1}
    assert boxes["rows"]["model/up.weight"] == boxes["rows"]["optimizer/up.weight/exp_avg"] == 2
    assert boxes["rows"]["model/up.bias"] == 1
    assert boxes["saved"]["model/up.bias"] == 2
    for name in boxes:
        model = build()
        states = adam(model)
        assert load(tmp_path / name, blank(model), states)["epoch"] == 3
        for key, value in model.state_dict().items():
            torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6, msg=f"{name}: {key}")
        assert train(model, states, rest) == pytest.approx(last, rel=1e-4)
    with pytest.raises(ValueError, match="'wait' is described, but the checkpoint has no such parameter"):
        redist(tmp_path / "saved", tmp_path / "bad", plan_of_rows(["wait"], 2, 2), None)
