"""Configurations: of the parallel sizes (19), how they are read (20), whole ones for GPT (46) and ViT
(47).
"""

from __future__ import annotations

import contextlib
import io
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import colossalai
from colossalai.amp import AMP_TYPE
from colossalai.amp.naive_amp import NaiveAMPOptimizer
from colossalai.amp.torch_amp import TorchAMPOptimizer
from colossalai.context import ConfigException, ParallelConfig, ParallelMode
from colossalai.context.config_schema import load_config
from colossalai.core import global_context as gpc
from colossalai.engine.gradient_handler import BaseGradientHandler
from colossalai.registry import GRADIENT_HANDLER
from colossalai.testing import assert_equal_in_group, spawn
from tests.documents.pages import code
from tests.documents.scripts import LAUNCH, is_inside, prepare, run, stand_in, values_of
from tests.documents.test_engine import iterate, start
from tests.engine.plans import on_device
from tests.titans.test_cifar import write_batches
from titans.dataloader.cifar10 import build_cifar
from titans.loss.vocab_cross_entropy import vocab_parallel_cross_entropy
from titans.model.gpt import GPT
from titans.model.vit import vit_lite_depth7_patch4_32

# ---- page 19 ----


def sizes(parallel: dict[str, Any]) -> tuple[Any, ...]:
    plan = ParallelConfig.parse(parallel)
    return plan.pipeline, plan.tensor, plan.mode


def test_page_19_forms_of_parallel() -> None:
    # the first describes the format and is no Python
    _, *forms = code("19.forms").split("# this is ")
    accepted = [
        sizes(value) for form in forms if form.startswith("ok") for value in values_of("parallel", "#" + form)
    ]
    assert accepted == [(2, 4, "2d"), (2, 4, "2d"), (2, 1, None), (1, 4, "2d")]
    (refused,) = (form for form in forms if form.startswith("not ok"))
    (without_mode,) = values_of("parallel", "#" + refused)
    with pytest.raises(ConfigException, match=r"parallel\.tensor has size 4 but no mode"):
        ParallelConfig.parse(without_mode)


def test_page_19_every_kind_of_parallelism() -> None:
    modes = [sizes(value) for value in values_of("parallel", code("19.modes"))]
    assert modes == [(1, 4, "1d"), (1, 4, "2d"), (1, 8, "2.5d"), (1, 8, "3d")]
    assert [sizes(value) for value in values_of("parallel", code("19.pipeline"))] == [(4, 1, None)]
    assert [sizes(value) for value in values_of("parallel", code("19.sequence"))] == [(1, 4, "sequence")]


# ---- page 20 ----


def check_page_20(rank: int, world_size: int, port: int, folder: Path) -> str:
    prepare(folder, code("20.fp16") + ")\n" + code("20.batch_size"))
    rank_of = {"rank": rank, "world_size": world_size, "port": port}
    run(code("20.launch", LAUNCH), **rank_of)
    assert gpc.config.fp16.mode is AMP_TYPE.TORCH
    model = torch.nn.Linear(2, 2)
    engine, *_ = colossalai.initialize(model, torch.optim.SGD(model.parameters()))
    assert is_inside(engine.optimizer, TorchAMPOptimizer)  # "will inject this feature"
    gpc.destroy()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run(code("20.access", LAUNCH), **rank_of)
    return printed.getvalue()


def test_page_20_define_your_configuration(tmp_path: Path) -> None:
    (printed,) = spawn(check_page_20, 1, folder=tmp_path)
    assert printed == "32\n"


# ---- page 46, the config of GPT-2 ----


def install_model() -> None:
    """The example's module ``model``: the names that the config takes from it, for a small GPT."""
    small = {"vocab_size": 64, "max_position_embeddings": 16, "hidden_size": 16, "num_heads": 2, "depth": 2}
    stand_in(
        "model",
        GPT2_small_pipeline_1D=partial(GPT, **small),
        vocab_parallel_cross_entropy=vocab_parallel_cross_entropy,
    )


def check_page_46_sizes(rank: int, world_size: int, port: int, folder: Path) -> None:
    prepare(folder, code("46.gpt"))
    install_model()
    run(code("20.launch", LAUNCH), rank=rank, world_size=world_size, port=port)
    assert gpc.config.TENSOR_SHAPE == (8, 1024, 768)
    assert (gpc.config.BATCH_SIZE, gpc.config.NUM_EPOCHS) == (8, 60)
    modes = (ParallelMode.DATA, ParallelMode.PIPELINE, ParallelMode.PARALLEL_1D)
    assert [gpc.get_world_size(mode) for mode in modes] == [1, 2, 2]
    # the page's line, which shows how to use such a section
    model = gpc.config.model.pop("type")(**gpc.config.model)
    assert model.blocks[0].checkpoint
    assert {p.dtype for p in model.parameters()} == {torch.half}


def check_page_46_training(rank: int, world_size: int, port: int, folder: Path) -> list[float]:
    serial = (("pipeline=2", "pipeline=1"), ("size=2", "size=1"), ("0.00015", "0.01"))
    prepare(folder, code("46.gpt", *serial))
    install_model()
    run(code("20.launch", LAUNCH), rank=rank, world_size=world_size, port=port)
    config = gpc.config
    model = config.model.pop("type")(**config.model)
    optimizer = config.optimizer.pop("type")(model.parameters(), **config.optimizer)
    engine, *_ = colossalai.initialize(model, optimizer, config.loss_fn.pop("type")(**config.loss_fn))
    assert isinstance(engine.optimizer, NaiveAMPOptimizer)
    (tokens,) = on_device(torch.arange(16).repeat(config.BATCH_SIZE, 1))
    losses = []
    engine.train()
    for _ in range(40):
        engine.zero_grad()
        loss = engine.criterion(engine(tokens), tokens)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def test_page_46_config_of_gpt(tmp_path: Path) -> None:
    spawn(check_page_46_sizes, 4, folder=tmp_path)
    (losses,) = spawn(check_page_46_training, 1, folder=tmp_path)
    assert losses[-1] < losses[0] / 2


# ---- page 46, the sample with every section ----

SAMPLE = (
    ("zero = dict(\n    level=<int>,\n    ...\n)", "zero = dict(level=3)"),
    ("), ...]", ")]"),
    ("gradient_accumulation = <int>", "gradient_accumulation = 2"),
    ("clip_grad_norm = <float>", "clip_grad_norm = 1.0"),
)
# the commas would make tuples of the values
WITHOUT_COMMAS = (("benchmark = False,", "benchmark = False"), ("deterministic=True,", "deterministic=True"))
IMPORT = "from colossalai.amp import AMP_TYPE\n"


def test_page_46_commas_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(IMPORT + code("46.sample", *SAMPLE))
    with pytest.raises(ConfigException, match=r"'cudnn_benchmark' must be True or False.*a comma at the end"):
        load_config(tmp_path / "config.py")


def check_page_46_sample(rank: int, world_size: int, port: int, folder: Path) -> None:
    prepare(folder, IMPORT + code("46.sample", *SAMPLE, *WITHOUT_COMMAS))
    run(code("20.launch", LAUNCH), rank=rank, world_size=world_size, port=port)
    assert (
        gpc.get_world_size(ParallelMode.PARALLEL_2D_ROW)
        == gpc.get_world_size(ParallelMode.PARALLEL_2D_COL)
        == 2
    )
    assert gpc.config.fp16 == {"mode": AMP_TYPE.NAIVE, "initial_scale": 256}
    assert gpc.config.gradient_handlers == [{"type": "MyHandler", "arg1": 1, "arg": 2}]
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigException, match="both 'fp16' and 'zero'"):  # page 38: they are not compatible
        colossalai.initialize(model, torch.optim.SGD(model.parameters()))


class MyHandler(BaseGradientHandler):
    built_with: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, model: Any, optimizer: Any, arg1: int, arg: int) -> None:
        super().__init__(model, optimizer)
        self.built_with.append((arg1, arg))

    def handle_gradient(self) -> None:
        pass


def check_page_46_serial(rank: int, world_size: int, port: int, folder: Path) -> list[bool]:
    GRADIENT_HANDLER.register_module(MyHandler)
    serial = (("zero = dict(level=3)", ""), ("tensor=dict(size=4, mode='2d'),", ""))
    config = IMPORT + code("46.sample", *SAMPLE, *WITHOUT_COMMAS, *serial)
    names = start(rank, world_size, port, folder, config)
    assert isinstance(names["engine"].optimizer.optim, NaiveAMPOptimizer)
    assert names["engine"].optimizer.loss_scale == 2**8
    assert MyHandler.built_with == [(1, 2)]
    assert torch.backends.cudnn.deterministic
    return [not torch.equal(before, after) for before, after in iterate(names)]


def test_page_46_sample_with_every_section(tmp_path: Path) -> None:
    spawn(check_page_46_sample, 4, folder=tmp_path)
    assert spawn(check_page_46_serial, 1, folder=tmp_path) == [[False, True] * 4]


# ---- page 47 ----


def check_page_47_data_parallel(rank: int, world_size: int, port: int, folder: Path) -> list[bool]:
    config = code("47.data_parallel", ("BATCH_SIZE = 256", "BATCH_SIZE = 4"))

    def vit() -> torch.nn.Module:
        return vit_lite_depth7_patch4_32(depth=1, hidden_size=32, num_heads=2, dropout=gpc.config.DROP_RATE)

    def cifar() -> Any:
        return build_cifar(gpc.config.BATCH_SIZE, folder, padding=4, crop=32, resize=32)[0]

    names = start(rank, world_size, port, folder, config, MyModel=vit, MyTrainDataloader=cifar)
    assert gpc.get_world_size(ParallelMode.DATA) == 2
    assert gpc.config.dali.mixup_alpha == 0.2
    moved = [not torch.equal(before, after) for before, after in iterate(names)]
    for p in names["engine"].model.parameters():
        assert_equal_in_group(p.detach())
    return moved


def test_page_47_data_parallel(tmp_path: Path) -> None:
    # 5 files of 32 images: 20 batches of 4 for each of 2 ranks
    write_batches(tmp_path / "cifar-10-batches-py", per_file=32)
    moved, other = spawn(check_page_47_data_parallel, 2, folder=tmp_path)
    assert moved == other
    assert len(moved) == 20
    # every 16th iteration and the last; one of these two may be skipped at the first loss scale
    assert {15, 19} >= {i for i in range(20) if moved[i]} > set()


def check_page_47_sizes(rank: int, world_size: int, port: int, folder: Path, config: str) -> None:
    prepare(folder, config)
    run(code("20.launch", LAUNCH), rank=rank, world_size=world_size, port=port)
    assert gpc.config.TENSOR_SHAPE == (128, 197, 768)
    assert gpc.config.NUM_MICRO_BATCHES == gpc.pipeline_parallel_size == 2
    assert (gpc.tensor_parallel_size, gpc.data_parallel_size) == (world_size // 2, 1)
    assert gpc.is_initialized(ParallelMode.PARALLEL_1D) == (world_size == 4)


def test_page_47_pipeline_and_hybrid_configs(tmp_path: Path) -> None:
    pipeline = code("47.pipeline_other") + code("47.pipeline")
    spawn(check_page_47_sizes, 2, folder=tmp_path, config=pipeline)
    hybrid = code("47.hybrid_other") + code("47.hybrid")
    spawn(check_page_47_sizes, 4, folder=tmp_path, config=hybrid)
