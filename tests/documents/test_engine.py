"""Engine and trainer (21, 22) with checkpoints (24), gradient accumulation (33), clipping (35) and handlers
(37, 05).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.amp.torch_amp import TorchAMPOptimizer
from colossalai.booster.plugin.ddp import TorchDDPModel
from colossalai.context import Config, ParallelMode
from colossalai.context.dist_group_initializer import ProcessGroupInitializer
from colossalai.core import global_context as gpc
from colossalai.nn.metric import Accuracy
from colossalai.registry import DIST_GROUP_INITIALIZER
from colossalai.testing import assert_equal_in_group, spawn
from tests.documents.pages import code
from tests.documents.scripts import LAUNCH, is_inside, prepare, run
from tests.engine.plans import logged, on_device

# ---- page 21: a ResNet, with engine and with trainer ----

STEPS_1_TO_4 = (code("21.launch"), code("21.imports"), code("21.components"), code("21.initialize"))
CONFIG = code("21.config", ("BATCH_SIZE = 128", "BATCH_SIZE = 8"), ("NUM_EPOCHS = 200", "NUM_EPOCHS = 2"))


def check_page_21(rank: int, world_size: int, port: int, folder: Path, how: str) -> list[str]:
    prepare(folder, CONFIG)
    with logged() as messages:
        names = run(*STEPS_1_TO_4)
        if how == "engine":
            names = run(code("21.with_engine"), **names)
        elif how == "trainer":
            names = run(code("21.with_trainer"), **names)
        else:  # the pieces of the introduction
            names |= {"Accuracy": Accuracy, "NUM_EPOCHS": 2}
            hook_list, fit = code("21.hooks").split("# start training")
            names = run(code("21.trainer"), hook_list, code("21.own_hook"), fit, **names)
    assert is_inside(names["engine"].optimizer, TorchAMPOptimizer)
    assert names["lr_scheduler"].get_last_lr()[0] < 1e-6, "the end of the cosine"
    for p in names["model"].parameters():
        assert_equal_in_group(p.detach())
    return messages


def test_page_21_with_engine(tmp_path: Path) -> None:
    messages, _ = spawn(check_page_21, 2, folder=tmp_path, how="engine")
    lines = [m for m in messages if m.startswith("Epoch")]
    assert [line.split(":")[0] for line in lines] == ["Epoch 0 - train loss", "Epoch 1 - train loss"]
    assert "acc: " in lines[1]


def test_page_21_with_trainer(tmp_path: Path) -> None:
    messages, _ = spawn(check_page_21, 2, folder=tmp_path, how="trainer")
    lines = [m for m in messages if m.startswith("[Epoch")]
    parts = [f"[Epoch {epoch} / {part}]" for epoch in (0, 1) for part in ("Train", "Test")]
    assert [line.split(":")[0] for line in lines] == [part for part in parts for _ in ("metrics", "memory")]
    assert lines[0].split(": ")[1].startswith("Loss = ")
    assert " | LR = 0.05" in lines[0]
    assert "Accuracy = " in lines[2]


def test_page_21_with_own_hook(tmp_path: Path) -> None:
    messages, _ = spawn(check_page_21, 2, folder=tmp_path, how="own hook")
    lines = [m.split("]")[0] for m in messages if m.startswith(("[Epoch", "training"))]
    parts = [f"[Epoch {epoch} / {part}" for epoch in (0, 1) for part in ("Train", "Test")]
    assert lines == ["training starts", *parts, "training finished"]


# ---- page 22, on which the others build ----


class MyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def my_data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    batches = [(10 * torch.randn(4, 6, generator=generator), torch.tensor([0, 1, 2, 0])) for _ in range(8)]
    return [tuple(on_device(x, y)) for x, y in batches]  # type: ignore[misc]


def start(
    rank: int, world_size: int, port: int, folder: Path, config: str = "", **names: Any
) -> dict[str, Any]:
    """The script of page 22 under this config."""
    prepare(folder, config)
    names = {"MyModel": MyModel, "MyTrainDataloader": my_data, **names}
    return run(code("22.usage", LAUNCH), rank=rank, world_size=world_size, port=port, **names)


def iterate(names: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Page 21's iteration over the data; the first weight before and after each step."""
    seen = []
    weight = next(names["engine"].model.parameters())

    def batches() -> Any:
        for batch in names["train_dataloader"]:
            before = weight.detach().clone()
            yield on_device(*batch)
            seen.append((before, weight.detach().clone()))

    _, loop = code("21.iteration").split("for img")
    run("for img" + loop, engine=names["engine"], train_dataloader=batches())
    return seen


def check_page_22(rank: int, world_size: int, port: int, folder: Path) -> None:
    names = start(rank, world_size, port, folder)
    model = MyModel()  # another: the one of page 22 is initialized
    run(code("21.iteration"), **{**names, "model": model, "optimizer": torch.optim.SGD(model.parameters())})
    assert_equal_in_group(model.body.weight.detach())
    assert not torch.equal(model.body.weight.cpu(), MyModel().body.weight)


def test_page_22_and_the_iteration_of_21(tmp_path: Path) -> None:
    spawn(check_page_22, 2, folder=tmp_path)


# ---- page 24: checkpoints ----

YOUR_MODEL = ("model = ...", "model = MyModel()")
YOUR_OPTIMIZER = ("model=model, ...", "model=model, optimizer=torch.optim.SGD, criterion=criterion")


def check_page_24(rank: int, world_size: int, port: int, folder: Path, how: str) -> None:
    names = start(rank, world_size, port, folder)
    if how == "engine":
        names |= {"num_epochs": 2}
        names = run(code("24.save_engine", YOUR_MODEL, YOUR_OPTIMIZER), **names)
    else:
        block = code(
            "24.save_trainer",
            YOUR_MODEL,
            YOUR_OPTIMIZER,
            ("Trainer(engine, ...)", "Trainer(engine)"),
            ("model)\n    ...]", "model)]"),
            ("fit(...", "fit(train_dataloader, epochs=2,"),
            ("hook=", "hooks="),
        )
        names = run(block, **names)
    saved = {name: tensor.cpu().clone() for name, tensor in names["model"].state_dict().items()}
    loaded = run(code("24.load", YOUR_MODEL), MyModel=MyModel)["model"].state_dict()
    assert loaded.keys() == saved.keys()
    for name, tensor in saved.items():
        torch.testing.assert_close(loaded[name], tensor, rtol=0, atol=0)
    assert (how == "engine") == torch.equal(loaded["body.weight"], MyModel().body.weight), "trained or not"


@pytest.mark.parametrize("how", ["engine", "trainer"])
def test_page_24_checkpoints(how: str, tmp_path: Path) -> None:
    spawn(check_page_24, 2, folder=tmp_path, how=how)
    assert (tmp_path / "xxx.pt").is_file()


# ---- pages 33 and 35: accumulation and clipping, by the config ----


def check_page_33(rank: int, world_size: int, port: int, folder: Path) -> list[bool]:
    names = start(rank, world_size, port, folder, code("33.config", ("<int>", "4")))
    return [not torch.equal(before, after) for before, after in iterate(names)]


def test_page_33_only_the_fourth_iteration_moves_the_weights(tmp_path: Path) -> None:
    assert spawn(check_page_33, 1, folder=tmp_path) == [[False, False, False, True] * 2]


def check_page_35(rank: int, world_size: int, port: int, folder: Path, config: str) -> list[float]:
    names = start(rank, world_size, port, folder, config)
    norms = []
    parameters = list(names["model"].parameters())
    names["optimizer"].register_step_pre_hook(
        lambda *_: norms.append(torch.cat([p.grad.flatten() for p in parameters]).norm().item())
    )
    iterate(names)
    return norms


def test_page_35_gradients_are_clipped(tmp_path: Path) -> None:
    ((*free,),) = spawn(check_page_35, 1, folder=tmp_path, config="")
    ((*clipped,),) = spawn(check_page_35, 1, folder=tmp_path, config=code("35.config"))
    assert len(clipped) == 8
    assert max(clipped) <= 1.0 + 1e-5
    assert max(free) > 2.0, "there was something to clip"


# ---- pages 37 and 05: gradient handlers ----


def check_handlers(rank: int, world_size: int, port: int, folder: Path, handler: str, config: str) -> int:
    calls: list[int] = []
    run(handler, do_something=lambda: calls.append(1))

    def data() -> list[tuple[Tensor, Tensor]]:
        return [(x + rank, y) for x, y in my_data()]  # other data on each rank

    names = start(rank, world_size, port, folder, config, MyTrainDataloader=data)
    assert not isinstance(names["engine"].model, TorchDDPModel), "DDP is not used when there are handlers"
    iterate(names)
    if "DataParallelGradientHandler" in config:
        for p in names["engine"].model.parameters():
            assert_equal_in_group(p.detach())
    return len(calls)


def test_pages_37_and_05_own_gradient_handlers(tmp_path: Path) -> None:
    mine, yours = code("37.config"), code("05.handlers")
    assert spawn(check_handlers, 1, folder=tmp_path, handler=code("37.handler"), config=mine) == [8]
    assert spawn(check_handlers, 1, folder=tmp_path, handler=code("05.handler"), config=yours) == [8]


def test_page_37_the_handler_of_its_example_averages(tmp_path: Path) -> None:
    config = code("37.config", ("MyGradientHandler", "DataParallelGradientHandler"))
    spawn(check_handlers, 2, folder=tmp_path, handler="", config=config)


# ---- page 05: a parallel mode of one's own ----


def check_page_05(rank: int, world_size: int, port: int, folder: Path) -> None:
    x = ("size=x, mode='new_mode')", f"size={world_size}, mode='new_mode', arg1=1, arg2='two'))")
    prepare(folder, code("05.config", x))
    new_mode = ParallelMode.register("NEW_MODE", "new_mode")
    run(
        code("05.initializer"),
        code("05.mapping"),
        DIST_GROUP_INITIALIZER=DIST_GROUP_INITIALIZER,
        ProcessGroupInitializer=ProcessGroupInitializer,
        Config=Config,
        colossalai=colossalai,
    )
    run(code("20.launch", LAUNCH), rank=rank, world_size=world_size, port=port)
    assert gpc.tensor_parallel_size == 2
    assert gpc.get_ranks_in_group(ParallelMode.TENSOR) == [0, 1]
    assert not gpc.is_initialized(new_mode)  # the sample makes no groups
    with pytest.raises(
        RuntimeError, match=r"NEW_MODE has no process group .* whose initializer returns a group for"
    ):
        gpc.get_group(new_mode)


def test_page_05_own_parallel_mode(tmp_path: Path) -> None:
    spawn(check_page_05, 2, folder=tmp_path)
