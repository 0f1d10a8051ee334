"""Models without a row of depth: their blocks are found, and their stages train as the serial model does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from colossalai.pipeline import split_model
from colossalai.pipeline.stage import Placement
from colossalai.testing import spawn
from colossalai.testing.parity import Problem, Tolerance, check_plan

transformers = pytest.importorskip("transformers", reason="needs `pip install transformers`")

from tests.nn.policies import derived_zoo  # noqa: E402
from tests.pipeline.hugging_face import StagedRun  # noqa: E402
from tests.pipeline.plans import config, launch  # noqa: E402

# the losses of micro-batches are summed in fp32
EXACT = Tolerance(loss=1e-7, gradient=1e-9, weight=1e-9)

# Why a model has no stages: one layer for all blocks, parameters beside the blocks, a bias of positions that
# all blocks learn from, blocks that return sizes, values that code reads, an entry that returns more than the
# hidden states.
REFUSED = {
    "albert": "no list of like blocks",
    "deberta": "no list of like blocks",
    "deberta_v2": "do not compute what the whole model does",
    "mpnet": "do not compute what the whole model does",
    "xlnet": "'transformer.mask_emb' belongs to a module that all stages hold",
    "clip": "'logit_scale' belongs to a module that all stages hold",
    "wav2vec2": "do not compute what the whole model does",
    "vit_mae": "do not compute what the whole model does",
    "swin": "do not compute what the whole model does",
}
SPLIT = [name for name in derived_zoo.MODELS if name not in REFUSED]


def _batch(model: Any, step: int) -> dict[str, Tensor]:
    """As many labels in each micro-batch, so that the mean of their losses is that of all."""
    given = derived_zoo.batch(model, step)
    if "attention_mask" in given:
        given["labels"] = given["labels"].masked_fill(given["labels"] < 0, 5)
    return given


def check_stages(rank: int, world_size: int, port: int, names: list[str], tensor: int) -> None:
    torch.set_num_threads(1)
    settings = config("1f1b", world_size // tensor, 2)
    if tensor > 1:
        settings["parallel"]["tensor"] = {"size": tensor, "mode": "1d"}
    launch(settings)
    for name in names:
        torch.set_default_dtype(torch.float64 if name == "xglm" else torch.float32)
        serial = derived_zoo.build(name)
        problem = Problem(
            build=lambda serial=serial: copy.deepcopy(serial),  # type: ignore[misc]
            batches=[_batch(serial, step) for step in range(3)],
            loss=derived_zoo.loss,
        )
        try:
            check_plan(problem, StagedRun, tolerance=EXACT)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_stages() -> None:
    """A tuple from each block (BLOOM), and an encoder with a decoder (BART)."""
    spawn(check_stages, 2, names=["bloom", "bart"], tensor=1, timeout=300.0)


@pytest.mark.slow
@pytest.mark.parametrize("names", [SPLIT[i : i + 8] for i in range(0, len(SPLIT), 8)], ids=lambda n: n[0])
def test_all_stages(names: list[str]) -> None:
    spawn(check_stages, 2, names=names, tensor=1, timeout=600.0)


@pytest.mark.slow
def test_stages_of_pieces() -> None:
    spawn(check_stages, 4, names=["gptj", "bloom", "roberta", "bart"], tensor=2, timeout=600.0)


@pytest.mark.parametrize("name", ["mpnet", "albert"])
def test_what_cannot_be_split_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[name]):
        split_model(derived_zoo.build(name), Placement(2), 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_all_that_cannot_be_split_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[name]):
        split_model(derived_zoo.build(name), Placement(2), 0)


def test_a_model_without_values_is_not_split_by_guess() -> None:
    model = derived_zoo.build("bloom").to("meta")
    with pytest.raises(ValueError, match=r"found the blocks .*'transformer.h', but could not try the stages"):
        split_model(model, Placement(2), 0)
