"""Models with experts equal themselves trained serially: weights, losses, every gradient.  Padding goes to no
expert.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.context.fake_launch import fake_launch
from colossalai.context.moe_context import MOE_CONTEXT
from colossalai.nn import CrossEntropyLoss
from colossalai.nn.layer.moe import MoeLayer
from colossalai.nn.layer.moe.tokens import TokenOrder
from colossalai.nn.loss import MoeLoss
from colossalai.nn.sequence import SequenceParallel
from colossalai.testing import RankError
from colossalai.testing.parity import ParityRun, Problem, assert_equal_to_serial
from tests.rows.plans import sgd
from tests.titans.cut_sequences import EngineRun, launch
from titans.layer.basic import routed_tokens
from titans.layer.block import GPTBlock, MOEGPTBlock, ViTBlock
from titans.loss.lm_loss import GPTLMLoss
from titans.model.moe import MOEGPT, ViTMoE, Widenet, prmoe_4b, prmoe_31b
from titans.model.pipeline_gpt import build_gpt_pipeline
from titans.model.pipeline_vit import build_pipeline_vit

ROWS, DEPTH, WORDS = 4, 2, 2053  # more words than a head has whole on every rank under 1D
SIZES: dict[str, Any] = {"hidden_size": 16, "num_heads": 4, "dropout": 0.0, "attention_dropout": 0.0}
TEXT: dict[str, Any] = {"vocab_size": WORDS, "max_position_embeddings": 16, "embedding_dropout": 0.0}
IMAGE: dict[str, Any] = {"img_size": 12, "patch_size": 4, "num_classes": 5}
TIGHT: dict[str, Any] = {"capacity_factor_train": 0.8, "min_capacity": 0}  # some tokens are dropped
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt": (MOEGPT, {**TEXT, **TIGHT, "num_experts": [2, 4], "use_residual": True}),
    "text": (MOEGPT, {**TEXT, **TIGHT, "num_experts": 4, "top_k": 2}),  # without a mask
    "vit": (ViTMoE, {**IMAGE, **TIGHT, "num_experts": 4}),
    "widenet": (Widenet, {**IMAGE, **TIGHT, "num_experts": 4, "checkpoint": True}),
}


def options(kind: str, **changes: Any) -> dict[str, Any]:
    return {**SIZES, **KINDS[kind][1], **changes}


def build(kind: str, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = KINDS[kind][0](depth=DEPTH, **options(kind, **changes))
    return model


def criterion(kind: str) -> nn.Module:
    return MoeLoss(0.5, GPTLMLoss if KINDS[kind][0] is MOEGPT else CrossEntropyLoss)


def batches(kind: str, length: int, steps: int = 2) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    if KINDS[kind][0] is not MOEGPT:
        images = torch.randn(steps, ROWS, 3, 12, 12, generator=generator)
        return [(x, torch.randint(5, (ROWS,), generator=generator)) for x in images]
    found: list[Any] = []
    for _ in range(steps):
        ids = torch.randint(WORDS, (ROWS, length), generator=generator)
        if kind == "text":
            found.append(({"input_ids": ids}, ids))
            continue
        mask = torch.ones_like(ids)
        mask[::2, :3], mask[1::2, -3:] = 0, 0
        labels = ids.masked_fill(mask == 0, -100)
        # equally many in each row, so that the mean over replicas is that over all tokens
        labels[::2, 3] = -100
        found.append(({"input_ids": ids, "attention_mask": mask}, labels))
    return found


def problem(kind: str, length: int, **changes: Any) -> Problem:
    loss_of = criterion(kind)

    def loss(model: nn.Module, pair: tuple[Any, Tensor]) -> Tensor:
        torch.manual_seed(2)  # of the noise
        data, labels = pair
        found: Tensor = loss_of(model(**data) if isinstance(data, dict) else model(data), labels)
        return found

    return Problem(
        build=partial(build, kind, **changes), batches=batches(kind, length), loss=loss, optimizer=sgd
    )


class ExpertRun(EngineRun):
    """A problem of this file through ``colossalai.initialize``."""

    def __init__(self, task: Problem, kind: str, **changes: Any) -> None:
        if kind == "widenet":
            model = build(kind, **changes)
        else:
            torch.manual_seed(0)
            stages = build_gpt_pipeline if KINDS[kind][0] is MOEGPT else build_pipeline_vit
            model = stages(
                DEPTH, device=torch.device("cpu"), model=KINDS[kind][0], **options(kind, **changes)
            )
        self.names = {p: name for name, p in model.named_parameters()}
        self.engine, *_ = colossalai.initialize(
            model, task.optimizer(model.parameters()), criterion(kind), verbose=False
        )
        self.engine.train()

    def _step(self, batch: Any) -> Tensor | None:
        torch.manual_seed(2)
        return super()._step(batch)


def under(task: Problem, kind: str, plan: dict[str, Any], **changes: Any) -> ParityRun:
    launch(plan, NUM_MICRO_BATCHES=1)
    return ExpertRun(task, kind, **changes)


PLANS: dict[str, tuple[dict[str, Any], int]] = {
    "ep2": ({"moe": 2}, 2),
    "ep2-dp2": ({"moe": 2}, 4),
    "ep4": ({"moe": 4}, 4),
    "ep2-tp2": ({"moe": 2, "tensor": {"size": 2, "mode": "1d"}}, 4),
    "ep2-sp2": ({"moe": 2, "sequence": 2}, 4),
    "ep2-ulysses2": ({"moe": 2, "sequence": {"size": 2, "attention": "ulysses"}}, 4),
    "megatron2": ({"tensor": {"size": 2, "mode": "1d", "sequence_parallel": True}}, 2),
    "3d": ({"tensor": {"size": 8, "mode": "3d"}}, 8),
    "2d": ({"tensor": {"size": 4, "mode": "2d"}}, 4),
}
# an odd length where it may be
CASES = [
    (kind, plan, 14 if plan == "megatron2" else 13)
    for plan, kind in itertools.product(PLANS, KINDS)
    if plan != "megatron2" or kind == "gpt"  # a ViT has a token more than patches
]
SAMPLE = {
    ("gpt", "ep2-sp2"),
    ("text", "ep2-sp2"),
    ("widenet", "ep2"),
    ("widenet", "ep2-sp2"),
    ("vit", "ep2-dp2"),
    ("gpt", "ep2-tp2"),
    ("gpt", "megatron2"),
    ("gpt", "2d"),
}


@pytest.mark.parametrize(
    ("kind", "plan", "length"),
    [
        pytest.param(*case, id="-".join(map(str, case)), marks=[] if case[:2] in SAMPLE else pytest.mark.slow)
        for case in CASES
    ],
)
def test_training_equals_the_serial_one(kind: str, plan: str, length: int) -> None:
    parallel, ranks = PLANS[plan]
    assert_equal_to_serial(
        partial(problem, kind, length), partial(under, kind=kind, plan=parallel), ranks, timeout=120
    )


def test_pipeline_stages_with_experts_equal_the_serial_model() -> None:
    changes = {"noisy_policy": None}  # stages draw their own
    for kind, plan, ranks in (
        ("gpt", {"pipeline": 2, "moe": 2}, 4),
        ("vit", {"pipeline": 2}, 2),
        ("gpt", {"pipeline": 2, "sequence": 2}, 4),
    ):
        assert_equal_to_serial(
            partial(problem, kind, 12, **changes),
            partial(under, kind=kind, plan=plan, **changes),
            ranks,
            timeout=120,
        )


def without_the_total(task: Problem, **plan: Any) -> ParityRun:
    run = under(task, "widenet", plan)
    TokenOrder.total = lambda self, x: x  # type: ignore[method-assign]
    return run


def test_without_the_sum_over_the_ranks_losses_are_wrong() -> None:
    with pytest.raises(RankError, match="ParityError: loss at step 0 differs"):
        assert_equal_to_serial(partial(problem, "widenet", 13), partial(without_the_total, moe=2), 2)


def layers(model: nn.Module) -> list[MoeLayer]:
    return [module for module in model.modules() if isinstance(module, MoeLayer)]


def test_padding_goes_to_no_expert() -> None:
    model = build("gpt", drop_tks=False)
    (data, _), _ = batches("gpt", 13)
    scores = model(**data)
    real = data["attention_mask"].bool()
    assert [int(layer.loads.tokens.sum()) for layer in layers(model)] == [int(real.sum())] * 2  # type: ignore[union-attr]
    # and what stands there changes nothing, also where experts are full
    model = build("gpt")
    scores = model(**data)
    other = {**data, "input_ids": data["input_ids"].masked_fill(~real, 7)}
    torch.testing.assert_close(model(**other)[real], scores[real])


def test_blocks_with_experts() -> None:
    torch.manual_seed(0)
    gpt = build("gpt", num_experts=[0, 4])
    first, second = gpt.blocks.children()  # type: ignore[union-attr]
    assert type(first) is GPTBlock
    assert isinstance(second, MOEGPTBlock)
    assert (first.routes, second.routes) == (False, True)
    assert len(layers(build("vit"))) == 1
    deep = ViTMoE(4, depth=5, **SIZES, **IMAGE)
    assert [block.routes for block in deep.blocks] == [False, True, False, True, False]


def test_all_blocks_of_a_widenet_are_one_but_for_their_norms() -> None:
    model = build("widenet")
    assert isinstance(model, Widenet)
    first, second = model.blocks
    assert isinstance(first, ViTBlock)
    assert first.attn is second.attn
    assert first.mlp is second.mlp
    assert first.norm1 is not second.norm1
    assert first.norm2 is not second.norm2
    deeper = Widenet(depth=DEPTH + 3, **options("widenet"))
    more = sum(p.numel() for p in deeper.parameters()) - sum(p.numel() for p in model.parameters())
    assert more == 3 * 4 * SIZES["hidden_size"]
    # each block adds its loss
    batch = batches("widenet", 13)[0]
    assert isinstance(model, nn.Module)
    MOE_CONTEXT.reset_loss()
    model(batch[0])
    assert len(MOE_CONTEXT._passes[True].made) == DEPTH


def test_a_widenet_cannot_be_cut_into_stages() -> None:
    with (
        fake_launch({"parallel": {"pipeline": 2}}, 0, 2),
        pytest.raises(
            ValueError, match="blocks of Widenet share parameters, which stages of different ranks"
        ),
    ):
        build_pipeline_vit(DEPTH, model=Widenet, **options("widenet"))
    whole = build_pipeline_vit(DEPTH, model=Widenet, **options("widenet"))
    assert [name for name, _ in whole.named_parameters()] == [
        name for name, _ in build("widenet").named_parameters()
    ]


@pytest.mark.parametrize(("named", "billions"), [(prmoe_4b, 4), (prmoe_31b, 31)])
def test_published_sizes(named: Any, billions: int) -> None:
    with torch.device("meta"):
        model = named()
    numbers = [layer.num_experts for layer in layers(model)]
    assert len(numbers) == 12
    assert numbers[-2:] == [2 * numbers[0]] * 2
    assert len(set(numbers[:-2])) == 1
    assert sum(p.numel() for p in model.parameters()) // 10**9 == billions


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": [4]}, "one for each of the 2 blocks, 0 for those without experts; got \\[4\\]"),
        ({"num_experts": [0, 0]}, "got \\[0, 0\\]"),
        ({"num_experts": 0}, "num_experts must be at least 1, got 0"),
        ({"num_experts": [0, 2], "top_k": 3}, "chooses 3 experts for each token, but there are 2"),
        ({"capacity_factor_train": 0}, "capacity_factor_train must be more than 0"),
        ({"mlp_ratio": 0.01}, "mlp_ratio=0.01 leaves no features inside the MLP"),
    ],
)
def test_bad_numbers(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build("gpt", **changes)


def test_one_block_has_no_second() -> None:
    with pytest.raises(ValueError, match="every second block, but depth=1; use more blocks, or"):
        MOEGPT(4, depth=1)


def test_a_stage_must_know_how_long_a_cut_sequence_is() -> None:
    x = torch.zeros(2, 8, 4)
    with pytest.raises(ValueError, match="give a pipeline batches that are dicts"):
        routed_tokens(x, None, None, {}, SequenceParallel(None, ring="sp"))  # type: ignore[arg-type]
