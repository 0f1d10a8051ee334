"""Families without a table: their 1D plans are derived, and train as the serial model does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.core import global_context as gpc
from colossalai.mesh import Mesh, placement
from colossalai.nn.layer.linear import Linear
from colossalai.nn.policies import Cut, Policy
from colossalai.nn.policies.trials.branch_trial import Way, try_branch
from colossalai.nn.policies.trials.branches import find_branches
from colossalai.nn.policies.wrap_forward import SwitchesNumbers
from colossalai.testing import assert_equal_in_group, fake_world, spawn
from colossalai.testing.parity import PlacedRun, Problem, Tolerance, check_plan

transformers = pytest.importorskip("transformers", reason="needs `pip install transformers`")

from tests.nn.policies import derived_zoo, zoo  # noqa: E402

EXACT = Tolerance(loss=1e-9, gradient=1e-9, weight=1e-9)

# The share of the weights of blocks that are cut, where it is not all of them: XLNet keeps those of attention
# as parameters of its own, and Swin's layers between stages, convolutions of sounds and BEiT's tables of
# positions are in no branch, nor are LED's layers for global tokens, which a pass without these does not
# call; a head of keys that all ranks need is whole.
SHARES = {
    "llama_mqa": 0.94,
    "llama_gqa": 0.88,
    "xlnet": 0.42,
    "swin": 0.93,
    "wav2vec2": 0.93,
    "beit": 0.97,
    "speech_to_text": 0.84,
    "swinv2": 0.86,
    "led": 0.86,
}


def _share(model: nn.Module, serial: nn.Module) -> float:
    """How many of the weights of blocks are cut."""
    numbers = {
        name: p.numel()
        for name, p in serial.named_parameters()
        if p.ndim > 1 and any(part.isdecimal() for part in name.split("."))
    }
    cut = sum(numbers.get(name, 0) for name, p in model.named_parameters() if placement(p).sharded)
    return cut / sum(numbers.values())


# Those whose attention every rank computes as a whole; DeBERTa does not run without values.
NOT_DIVIDED = ("codegen", "deberta", "led")


def _is_divided(model: nn.Module) -> bool:
    layers = [m for m in model.modules() if isinstance(m, Linear) and m.role == "expand"]
    return all(isinstance(m, SwitchesNumbers) for m in layers)


def check_families(rank: int, world_size: int, port: int, names: list[str]) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    zoo.launch({"size": world_size, "mode": "1d"})
    for name in names:
        # XGLM makes numbers of the default dtype
        torch.set_default_dtype(torch.float64 if name == "xglm" else torch.float32)
        serial = derived_zoo.build(name)
        problem = Problem(
            build=lambda serial=serial: copy.deepcopy(serial),  # type: ignore[misc]
            batches=[derived_zoo.batch(serial, step) for step in range(2)],
            loss=derived_zoo.loss,
        )
        model = colossalai.nn.parallelize(problem.build())
        share = _share(model, serial)
        assert share >= SHARES.get(name, 1.0), f"{name}: {share} of the weights of blocks are cut"
        assert _is_divided(model) is (name not in NOT_DIVIDED), name
        try:
            check_plan(
                problem,
                lambda p, model=model: PlacedRun(p, model, gpc.mesh, p.loss),  # type: ignore[misc]
                tolerance=EXACT,
            )
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


# Keys beside values beside queries, with a bias of positions (MPT), a table of positions by heads (mT5), one
# that layers slice (BEiT), code that reads values (DeBERTa).
SAMPLE = ["mpt", "mt5", "beit", "deberta"]
# One head of keys for all ranks, also in a fused layer, and one for each pair; rows and heads in one dim.
SAMPLE_ON_FOUR = ["llama_mqa", "llama_gqa", "falcon_mqa", "bloom"]


def test_families() -> None:
    spawn(check_families, 2, names=SAMPLE, timeout=300.0)


def test_families_on_four() -> None:
    spawn(check_families, 4, names=SAMPLE_ON_FOUR, timeout=300.0)


def _chunks() -> list[list[str]]:
    names = list(derived_zoo.MODELS)
    return [names[i : i + 8] for i in range(0, len(names), 8)]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("names", _chunks(), ids=lambda names: f"{names[0]}...{names[-1]}")
def test_all_families(names: list[str], size: int) -> None:
    spawn(check_families, size, names=names, timeout=600.0)


# ---- dropout ----


def check_dropout(rank: int, world_size: int, port: int) -> None:
    torch.set_num_threads(1)
    zoo.launch({"size": world_size, "mode": "1d"})
    for name, rates in {
        "gptj": ("attn_pdrop", "resid_pdrop"),
        "roberta": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
        "bart": ("dropout", "attention_dropout", "activation_dropout"),
    }.items():
        model = colossalai.nn.parallelize(derived_zoo.build(name, **dict.fromkeys(rates, 0.5)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(2):
            derived_zoo.loss(model, derived_zoo.batch(model, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        for param in model.parameters():
            if not placement(param).sharded:
                assert_equal_in_group(param.data)


def test_dropout_leaves_copies_alike() -> None:
    spawn(check_dropout, 2)


# ---- what is not cut is named, and what is wrong is refused ----


def test_the_report_names_what_is_not_divided(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_world(rank=0, world_size=2):
        colossalai.nn.parallelize(derived_zoo.build("xlnet"), "1d", mesh=Mesh({"tp": 2}))
        colossalai.nn.parallelize(derived_zoo.build("codegen"), "1d", mesh=Mesh({"tp": 2}))
    words = capsys.readouterr().err
    assert "transformer.layer.*.rel_attn.q (2 times): it is whole on every rank" in words
    assert (
        "transformer.h.*.attn: qkv_proj -> out_proj (2 times): its weights are cut, but every rank" in words
    )


def check_verified(rank: int, world_size: int, port: int) -> None:
    zoo.launch({"size": world_size, "mode": "1d"})
    # queries, keys and values lie beside each other: without fused=2 a rank gets parts of the wrong ones
    wrong = Policy(("modernbert",), {"mlp.Wi": Cut("expand"), "mlp.Wo": Cut("contract")})
    with pytest.raises(
        RuntimeError, match=r"does not compute what the whole model does: on rank 0 its output"
    ):
        colossalai.nn.parallelize(derived_zoo.build("modernbert"), policy=wrong, verify=True)
    right = Policy(("modernbert",), {"mlp.Wi": Cut("expand", fused=2), "mlp.Wo": Cut("contract")})
    colossalai.nn.parallelize(derived_zoo.build("modernbert"), policy=right, verify=True)


def test_a_wrong_plan_is_found_on_real_numbers() -> None:
    spawn(check_verified, 2)


# ---- trials of single branches ----


class Gated(nn.Module):
    """Its gate and its values are one output, beside each other or in turns."""

    def __init__(self, in_turns: bool, mean: bool = False) -> None:
        super().__init__()
        self.in_turns, self.mean = in_turns, mean
        self.up, self.down = nn.Linear(8, 32), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        gate, value = y.unflatten(-1, (-1, 2)).unbind(-1) if self.in_turns else y.chunk(2, -1)
        inner = gate.sigmoid() * value
        return x + self.down(inner - inner.mean(-1, keepdim=True) if self.mean else inner)


class Net(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Gated(**options) for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("options", "blocks"),
    [({"in_turns": True}, 1), ({"in_turns": False}, 2), ({"in_turns": True, "mean": True}, None)],
    ids=["in turns", "beside", "mean over features"],
)
def test_the_order_of_fused_outputs_is_found(options: dict[str, bool], blocks: int | None) -> None:
    model = Net(**options)
    found = find_branches(model)
    assert found is not None
    assert [b.home for b in found.branches] == ["blocks.0", "blocks.1"]
    trial = try_branch(model, found.branches[0], found.calls["blocks.0"], parts=2)
    assert trial is not None
    way = trial.find([])
    assert (None if way is None else way.fused["blocks.0.up"]) == blocks
    if blocks is not None:
        assert not trial.fits(Way({"blocks.0.up": 3 - blocks}))


class Images(nn.Module):
    """A model without a config, as timm has it: its argument is an image of the size that it names."""

    image_size = 8

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.blocks = nn.Sequential(Gated(in_turns=False), Gated(in_turns=False))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks(self.stem(x).flatten(2).mT)
        return y


def test_a_model_of_images_without_a_config() -> None:
    found = find_branches(Images().double())
    assert found is not None
    assert [branch.home for branch in found.branches] == ["blocks.0", "blocks.1"]


def test_a_model_without_branches_is_refused() -> None:
    with fake_world(rank=0, world_size=2), pytest.raises(ValueError, match="none could be derived from its"):
        colossalai.nn.parallelize(nn.Linear(4, 4), "1d", mesh=Mesh({"tp": 2}))
