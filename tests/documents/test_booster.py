"""Booster (14), with gradient accumulation (34), gradient clipping (36) and mixed precision (39)."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from colossalai.amp.torch_amp import TorchAMPOptimizer
from colossalai.booster.mixed_precision import PRECISIONS, FP16TorchMixedPrecision
from colossalai.testing import assert_equal_in_group, spawn
from tests.documents.pages import code
from tests.documents.scripts import WITHOUT_INDEX, as_it_is, is_inside, prepare, run

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL_BATCH = ("BATCH_SIZE = 128", "BATCH_SIZE = 8")


def check_page_14(rank: int, world_size: int, port: int, folder: Path, use_safetensors: bool) -> None:
    prepare(folder)
    script = code("14.train", ("x.to('cuda')", f"x.to('{DEVICE}')")) + "    return locals()\n"
    rank_of = {"rank": rank, "world_size": world_size, "port": port}
    names = run(script, use_safetensors=use_safetensors, **rank_of)["train"]()
    assert names["optimizer"].param_groups[0]["lr"] == pytest.approx(0.0001)
    for name, value in names["model"].state_dict().items():
        if rank == 0 or "running" not in name:  # rank 0's statistics are saved
            torch.testing.assert_close(names["new_model"].state_dict()[name], value.cpu())


@pytest.mark.parametrize(("world_size", "use_safetensors"), [(1, False), (2, True)])
def test_page_14_booster(world_size: int, use_safetensors: bool, tmp_path: Path) -> None:
    spawn(check_page_14, world_size, folder=tmp_path, use_safetensors=use_safetensors)
    shards = [path for path in (tmp_path / "model").iterdir() if path.suffix in (".bin", ".safetensors")]
    assert len(shards) >= 5, "45 MB of weights in shards of 10 MB"
    assert {path.suffix for path in shards} == {".safetensors" if use_safetensors else ".bin"}


def check_page_34(rank: int, world_size: int, port: int, folder: Path) -> tuple[list[str], str]:
    prepare(folder)
    names = run(
        code("34.imports"),
        code("34.launch"),
        code("34.components", SMALL_BATCH),
        code("34.boost"),
        param_by_iter=[],
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run(code("34.train"), **names)
    for p in names["model"].parameters():
        assert_equal_in_group(p.detach())
    return names["param_by_iter"], printed.getvalue()


@pytest.mark.parametrize("world_size", [1, 2])
def test_page_34_gradient_accumulation(world_size: int, tmp_path: Path) -> None:
    for values, printed in spawn(check_page_34, world_size, folder=tmp_path):
        assert values[0] == values[1] == values[2] != values[3]
        lines = [f"iteration {i} - value: {value}" for i, value in enumerate(values)]
        assert printed.splitlines() == [*lines, "The parameter is only updated in the last iteration"]


def check_page_36(rank: int, world_size: int, port: int, folder: Path) -> None:
    prepare(folder)
    norms: list[float] = []
    names = run(code("36.imports"), code("36.launch"), code("36.components", SMALL_BATCH), code("36.boost"))

    def keep_norm(*_: Any) -> None:
        gradients = [p.grad.flatten() for p in names["model"].parameters()]
        norms.append(torch.cat(gradients).norm().item())

    names["optimizer"].unwrap().register_step_pre_hook(keep_norm)
    first = next(names["model"].parameters()).detach().clone()
    run(code("36.train"), **names)
    assert norms == pytest.approx([0.1] * len(norms), rel=1e-3)
    assert len(norms) >= 2, "of 4; another machine's rounding may overflow at the first scale and skip a step"
    assert not torch.equal(next(names["model"].parameters()), first)
    assert 0.09 < names["optimizer"].param_groups[0]["lr"] < 0.1


@pytest.mark.parametrize("world_size", [1, 2])
def test_page_36_gradient_clipping(world_size: int, tmp_path: Path) -> None:
    spawn(check_page_36, world_size, folder=tmp_path)


def test_page_39_how_a_precision_is_chosen() -> None:
    script = code("39.booster", (",...)", ")"))
    booster = run(script)["booster"]
    assert isinstance(booster.mixed_precision, FP16TorchMixedPrecision)
    for name in re.findall(r"^'(\w+)': ", script, flags=re.MULTILINE):
        assert name in PRECISIONS
    names = run(script, code("39.object", (",...)", ")")))
    assert names["booster"].mixed_precision is names["mixed_precision"]


def check_page_39(rank: int, world_size: int, port: int, folder: Path) -> None:
    prepare(folder)
    names = run(
        code("39.imports"),
        code("39.launch"),
        code("39.components", ("BATCH_SIZE = 128", "BATCH_SIZE = 4")),
        code(
            "39.boost",
            ("criterion, dataloader, lr_scheduler\n", "criterion, train_dataloader, lr_scheduler\n"),
        ),
        Gray2RGB=as_it_is,
    )
    dtypes = set()
    names["model"].unwrap().head.register_forward_hook(lambda *args: dtypes.add(args[-1].dtype))
    before = [p.detach().clone() for p in names["model"].parameters()]
    names = run(code("39.train", WITHOUT_INDEX), **names)
    assert is_inside(names["optimizer"], TorchAMPOptimizer)
    assert dtypes == {torch.float16}
    assert names["loss"].isfinite()
    assert any(not torch.equal(p, old) for p, old in zip(names["model"].parameters(), before, strict=True))
    for p in names["model"].parameters():
        assert p.dtype == torch.float32
        assert_equal_in_group(p.detach())
    # 50 steps of warm-up, of which two epochs take two
    assert names["optimizer"].param_groups[0]["lr"] == pytest.approx(1e-2 * 3 / 51)


@pytest.mark.parametrize("world_size", [1, 2])
def test_page_39_mixed_precision(world_size: int, tmp_path: Path) -> None:
    spawn(check_page_39, world_size, folder=tmp_path)
