"""Models without a row of depth: their blocks are found, and their stages train as the serial model does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colossalai.lazy import LazyInitContext, materialize
from colossalai.nn.policies.stages import stage
from colossalai.pipeline import split_model, tied
from colossalai.pipeline.stage import Placement
from colossalai.testing import RankError, spawn
from colossalai.testing.parity import Problem, Tolerance, check_plan

transformers = pytest.importorskip("transformers", reason="needs `pip install transformers`")

from tests.nn.policies import derived_zoo  # noqa: E402
from tests.pipeline.hugging_face import StagedRun  # noqa: E402
from tests.pipeline.plans import config, launch  # noqa: E402

# the losses of micro-batches are summed in fp32
EXACT = Tolerance(loss=1e-7, gradient=1e-9, weight=1e-9)

# Why a model has no stages: a loss that relates samples.
REFUSED = {"clip": "'logits_per_image' relates the rows of a batch to each other"}
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
    """A tuple from each block (BLOOM), an encoder with a decoder (BART), one layer for all blocks (ALBERT), a
    bias of positions for all of them (MPNet), several outputs of what comes before (Wav2Vec2), of which the
    tail needs some (ViT-MAE) or all blocks do (RoFormer), a list from each block (OpenAI's GPT), other lists
    beside those of the blocks (Speech2Text), an encoder that returns more than states (LED), sizes from each
    block (Swin V2).
    """
    names = ["bloom", "bart", "albert", "mpnet", "wav2vec2"]
    names += ["vit_mae", "roformer", "openai_gpt", "speech_to_text", "led", "swinv2"]
    spawn(check_stages, 2, names=names, tensor=1, timeout=300.0)


def without_the_tie(rank: int, world_size: int, port: int, name: str) -> None:
    tied.sum_shared_gradients = lambda parameters: None
    check_stages(rank, world_size, port, [name], 1)


@pytest.mark.parametrize("name", ["albert", "mpnet"])
def test_stages_add_up_the_gradients_of_what_all_hold(name: str) -> None:
    with pytest.raises(RankError, match=r"the stages that share .* differ"):
        spawn(without_the_tie, 2, name=name)


@pytest.mark.slow
@pytest.mark.parametrize("names", [SPLIT[i : i + 8] for i in range(0, len(SPLIT), 8)], ids=lambda n: n[0])
def test_all_stages(names: list[str]) -> None:
    spawn(check_stages, 2, names=names, tensor=1, timeout=600.0)


@pytest.mark.slow
def test_stages_of_pieces() -> None:
    spawn(
        check_stages,
        4,
        names=["gptj", "bloom", "roberta", "bart", "albert", "mpnet"],
        tensor=2,
        timeout=600.0,
    )


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_split_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[name]):
        split_model(derived_zoo.build(name), Placement(2), 0)


class Gated(nn.Module):
    """A gate that starts at 1 is applied after each block, or once at the end."""

    def __init__(self, each: bool, buffer: bool = False) -> None:
        super().__init__()
        self.table, self.each = nn.Embedding(131, 8), each
        self.parts = nn.ModuleList([nn.Linear(8, 8)] if buffer else (nn.Linear(8, 8) for _ in range(4)))
        self.calls = 4 if buffer else 1
        if buffer:
            self.parts[0].register_buffer("seen", torch.zeros(()))
        self.gate = nn.Parameter(torch.ones(8))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.table(input_ids)
        for part in self.parts:
            for _ in range(self.calls):
                x = part(x) * (self.gate if self.each else 1)
        return x * self.gate


def test_parameters_beside_the_blocks() -> None:
    serial, ids = Gated(each=False), torch.arange(6).view(2, 3)
    first, last = (split_model(copy.deepcopy(serial), Placement(2), rank) for rank in range(2))
    assert "gate" in first.state_dict()
    assert torch.equal(last(first(input_ids=ids), input_ids=ids), serial(ids))
    with pytest.raises(ValueError, match=r"do not compute what the whole model does \(its output '0' is off"):
        split_model(Gated(each=True), Placement(2), 0)
    with pytest.raises(ValueError, match=r"every stage would hold its buffer 'parts.0.seen'"):
        split_model(Gated(each=False, buffer=True), Placement(2), 0)


class Flat(nn.Module):
    """Blocks in a ``Sequential``, after a stem for images, as timm has it."""

    image_size = 8

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 4, 4), norm
        self.blocks = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.blocks(self.stem(x).flatten(2).mT).mean(1))
        return y


def test_blocks_in_a_sequential() -> None:
    serial, x = Flat(nn.LayerNorm(6)), torch.randn(2, 3, 8, 8)
    first, last = (split_model(copy.deepcopy(serial), Placement(2), rank) for rank in range(2))
    assert "stem.weight" not in last.state_dict()
    assert torch.equal(last(first(x=x), x=x), serial(x))
    with pytest.raises(ValueError, match=r"its 'norm' \(BatchNorm1d\) takes statistics over the rows"):
        split_model(Flat(nn.BatchNorm1d(6)), Placement(2), 0)


def test_a_loss_that_is_a_sum_is_refused() -> None:
    model: Any = derived_zoo.build("wav2vec2", ctc_loss_reduction="sum")
    given = _batch(model, 0)
    first = split_model(model, Placement(2), 0)
    with pytest.raises(ValueError, match=r"set config.ctc_loss_reduction='mean'"):
        first(**given)


def _without_memory(name: str) -> Any:
    with LazyInitContext(large=1):
        return derived_zoo.build(name)


@pytest.mark.parametrize("name", ["bloom", "bart", "albert", "mpnet", "vit_mae"])
def test_a_model_without_memory(name: str) -> None:
    serial = derived_zoo.build(name).eval()
    first, last = (materialize(split_model(_without_memory(name), Placement(2), rank)) for rank in range(2))
    whole = serial.state_dict()
    for part in (first.eval(), last.eval()):
        assert all(torch.equal(value, whole[key]) for key, value in part.state_dict().items())
    given = _batch(serial, 0)
    sent = first(**given)
    received = sent if isinstance(sent, tuple) else (sent,)
    assert torch.equal(last(*received, **given).loss, serial(**given).loss)


def test_stages_without_memory_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that begins with zeros in place of what it received is found, whatever the weights are."""
    zeros = lambda self, hidden, *_, **__: (torch.zeros_like(hidden), None)  # noqa: E731
    monkeypatch.setattr(stage.BlockBefore, "forward", zeros)
    with pytest.raises(ValueError, match=r"do not compute .* 'logits' is off by"):
        split_model(_without_memory("bloom"), Placement(2), 0)


def test_a_model_on_the_meta_device_is_not_split_by_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    bloom = derived_zoo.build("bloom").to("meta")
    state = torch.get_rng_state()
    assert isinstance(split_model(bloom, Placement(2), 0), stage.ModelStage)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.device("meta"):
        model = Gated(each=False)
    told = r"found the blocks .*'parts', but could not try the stages.*LazyInitContext\(\)"
    with pytest.raises(ValueError, match=told):
        split_model(model, Placement(2), 0)  # nothing says how its gate is drawn
    zeros = lambda self, hidden, *_, **__: (torch.zeros_like(hidden), None)  # noqa: E731
    monkeypatch.setattr(stage.BlockBefore, "forward", zeros)
    with pytest.raises(ValueError, match=r"do not compute .* 'logits' is off by"):
        split_model(derived_zoo.build("bloom").to("meta"), Placement(2), 0)
