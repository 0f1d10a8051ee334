"""Pages 12 and 41 from their first line to their last: a sequential ViT and a ResNet trained in a
pipeline.
"""

from __future__ import annotations

from pathlib import Path

import torch

from colossalai.engine.schedule import PipelineSchedule
from colossalai.testing import spawn
from tests.documents.pages import code
from tests.documents.scripts import prepare, run
from tests.documents.test_pipeline import SMALL_VIT, install


def check_page_12(rank: int, world_size: int, port: int, folder: Path) -> tuple[type, int]:
    prepare(folder, arguments=["--backend", "gloo"])
    install()
    torch.set_num_threads(1)
    short = (
        ("NUM_EPOCHS = 60", "NUM_EPOCHS = 1"),
        ("display_progress=True)", "display_progress=False)\n    return trainer"),
    )
    names = run(code("12.imports"), code("12.model", SMALL_VIT), code("12.cifar"), code("12.train", *short))
    trainer = names["train"]()
    return type(trainer.engine.schedule), trainer.cur_step


def test_page_12_trains(tmp_path: Path) -> None:
    assert (
        spawn(check_page_12, 2, folder=tmp_path) == [(PipelineSchedule, 5)] * 2
    )  # 80 images in batches of 16


def check_page_41(rank: int, world_size: int, port: int, folder: Path) -> tuple[type, int]:
    prepare(folder, arguments=["--backend", "gloo"])
    install()
    torch.set_num_threads(1)
    short = (
        ("epochs=NUM_EPOCHS", "epochs=NUM_EPOCHS, max_steps=2"),
        ("test_dataloader=test_dataloader,\n", "\n"),
        ("display_progress=True", "display_progress=False"),
    )
    names = run(
        code("41.build", ("BATCH_SIZE = 64", "BATCH_SIZE = 8")),
        code("41.exec_seq"),
        code("41.partition"),
        code("41.train", *short),
    )
    return type(names["engine"].schedule), names["trainer"].cur_step


def test_page_41_trains(tmp_path: Path) -> None:
    assert spawn(check_page_41, 2, folder=tmp_path) == [(PipelineSchedule, 2)] * 2
