"""GPT and ViT as pipeline stages equal the whole models: names, initial weights, outputs, gradients and their
norm.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import colossalai
from colossalai.context import ParallelMode
from colossalai.context.fake_launch import fake_launch
from colossalai.core import global_context as gpc
from colossalai.engine.gradient_handler import SHARED_GROUP, PipelineSharedModuleGradientHandler
from colossalai.mesh import full_shape, grad_norm, placement, serial_form, unshard
from colossalai.nn.layer.wrapper import PipelineSharedModuleWrapper
from colossalai.testing import parametrize_sample, spawn
from titans.loss.lm_loss import GPTLMLoss
from titans.model import pipeline_gpt, pipeline_gpt1d
from titans.model.gpt import GPT
from titans.model.pipeline_gpt import build_gpt_pipeline
from titans.model.pipeline_vit import build_pipeline_vit
from titans.model.vit import VisionTransformer

DEPTH = 5
PLAIN = {"dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0}
GPT_SIZES: dict[str, Any] = {
    "vocab_size": 4096,  # large enough to be cut
    "max_position_embeddings": 8,
    "hidden_size": 16,
    "num_heads": 4,
    **PLAIN,
}
VIT_SIZES: dict[str, Any] = {
    "img_size": 8,
    "patch_size": 4,
    "hidden_size": 16,
    "num_heads": 4,
    "dropout": 0,
    "num_classes": 8,
    "init_method": "jax",
}


def gpt_batch() -> dict[str, Tensor]:
    ids = torch.randint(4096, (4, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("chunks", [1, 2])
def test_stages_of_one_process_are_the_model(chunks: int) -> None:
    torch.manual_seed(0)
    gpt, vit = GPT(depth=DEPTH, **GPT_SIZES), VisionTransformer(depth=DEPTH, **VIT_SIZES)
    torch.manual_seed(0)
    gpt_stages = build_gpt_pipeline(DEPTH, chunks, **GPT_SIZES)
    vit_stages = build_pipeline_vit(DEPTH, chunks, **VIT_SIZES)
    batch, images = gpt_batch(), torch.randn(2, 3, 8, 8)
    x, y = None, images
    for stage in [gpt_stages] if chunks == 1 else gpt_stages:  # type: ignore[attr-defined]
        x = stage(x, **batch)
    for stage in [vit_stages] if chunks == 1 else vit_stages:  # type: ignore[attr-defined]
        y = stage(y)
    assert torch.equal(x, gpt(**batch))  # type: ignore[arg-type]
    assert torch.equal(y, vit(images))
    for whole, stages in ((gpt, gpt_stages), (vit, vit_stages)):
        names = [name.split(".", 1)[1] if chunks > 1 else name for name, _ in stages.named_parameters()]
        assert names == [name for name, _ in whole.named_parameters()]


def test_a_batch_that_is_a_tensor_and_missing_input() -> None:
    torch.manual_seed(0)
    first, last = build_gpt_pipeline(DEPTH, 2, **GPT_SIZES)  # type: ignore[misc]
    ids = gpt_batch()["input_ids"]
    assert torch.equal(first(ids), first(None, input_ids=ids))
    with pytest.raises(ValueError, match="GPTStage needs hidden_states, got None"):
        last(input_ids=ids)
    with pytest.raises(ValueError, match="GPTStage needs input_ids, got None"):
        first()
    with pytest.raises(ValueError, match=r"attention_mask must be .* \(batch, sequence\), with 1 at real"):
        last(torch.ones(1, 8, 16), attention_mask=torch.ones(1, 8))
    with pytest.raises(
        ValueError, match="the model has 5 layers, but 1 pipeline stages with 6 chunks each need"
    ):
        build_gpt_pipeline(DEPTH, 6, **GPT_SIZES)


def launch(plan: dict[str, Any]) -> None:
    colossalai.launch_from_torch(config={"parallel": plan}, backend="gloo", verbose=False)
    torch.set_num_threads(1)


def pass_through(stage: nn.Module, batch: dict[str, Tensor] | Tensor) -> None:
    """One batch forwards and backwards through the pipeline, by hand."""
    first, last = gpc.is_first_rank(ParallelMode.PIPELINE), gpc.is_last_rank(ParallelMode.PIPELINE)
    before, after = (
        gpc.get_prev_global_rank(ParallelMode.PIPELINE),
        gpc.get_next_global_rank(ParallelMode.PIPELINE),
    )
    x = batch if torch.is_tensor(batch) and first else None
    if not first:
        shape = torch.empty(3, dtype=torch.long)
        dist.recv(shape, before)
        x = torch.empty(*shape.tolist()).requires_grad_()
        dist.recv(x.data, before)
    out = stage(x, **batch) if isinstance(batch, dict) else stage(x)
    if last:
        loss = GPTLMLoss()(out, batch["input_ids"]) if isinstance(batch, dict) else out.square().sum()
        loss.backward()
    else:
        dist.send(torch.tensor(out.shape), after)
        dist.send(out.detach().contiguous(), after)
        grad = torch.empty_like(out, memory_format=torch.contiguous_format)
        dist.recv(grad, after)
        out.backward(grad)
    if x is not None and x.requires_grad:
        assert x.grad is not None
        dist.send(x.grad.contiguous(), before)


def whole(p: Tensor, value: Tensor) -> Tensor:
    return serial_form(unshard(value.detach(), placement(p), gpc.mesh, tuple(full_shape(p))), p)


def check_stage(
    stage: nn.Module, batch: dict[str, Tensor] | Tensor, expected: dict[str, nn.Parameter]
) -> None:
    for name, p in stage.named_parameters():
        assert torch.equal(whole(p, p), expected[name]), name
    pass_through(stage, batch)
    PipelineSharedModuleGradientHandler(stage).handle_gradient()
    for name, p in stage.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(whole(p, p.grad), expected[name].grad, rtol=1e-4, atol=1e-5)


def check_plan(rank: int, world_size: int, port: int, plan: dict[str, Any], split: bool) -> list[str]:
    vit_sizes = {**VIT_SIZES, "init_method": "torch"}
    torch.manual_seed(0)
    gpt, vit = GPT(depth=DEPTH, **GPT_SIZES), VisionTransformer(depth=DEPTH, **vit_sizes)
    batch, images = gpt_batch(), torch.randn(4, 3, 8, 8)
    GPTLMLoss()(gpt(**batch), batch["input_ids"]).backward()
    vit(images).square().sum().backward()
    launch(plan)
    torch.manual_seed(0)
    stage = build_gpt_pipeline(DEPTH, 1, embed_split_hidden=split, **GPT_SIZES)
    vit_stage = build_pipeline_vit(DEPTH, 1, **vit_sizes)
    check_stage(stage, batch, {**dict(gpt.named_parameters()), "head.dense.weight": gpt.head.dense.weight})
    check_stage(vit_stage, images, dict(vit.named_parameters()))
    norm = grad_norm(stage.parameters(), gpc.mesh)
    reference = math.sqrt(sum(p.grad.square().sum().item() for p in gpt.parameters()))  # type: ignore[union-attr]
    assert norm.item() == pytest.approx(reference, rel=1e-5)
    return [name for name, p in stage.named_parameters() if hasattr(p, SHARED_GROUP)]


PLANS: list[tuple[int, dict[str, Any], bool]] = [
    (2, {"pipeline": 2}, False),
    (4, {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}, True),
    (3, {"pipeline": 3}, False),
    (4, {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}, False),
    (8, {"pipeline": 2, "tensor": {"size": 4, "mode": "2d"}}, False),
    (8, {"pipeline": 2, "tensor": {"size": 4, "mode": "2d"}}, True),
    (8, {"pipeline": 2, "tensor": {"size": 4, "mode": "2.5d", "depth": 1}}, False),
]


@parametrize_sample("nprocs, plan, split", PLANS, n=3)
def test_stages_over_ranks_equal_serial(nprocs: int, plan: dict[str, Any], split: bool) -> None:
    shared = spawn(check_plan, nprocs, plan=plan, split=split)
    assert shared[0] == ["embed.word_embeddings.weight"]
    assert shared[-1] == ["head.dense.weight"]
    assert sum(map(bool, shared)) == nprocs // plan["pipeline"] * 2


def check_wrapper(rank: int, world_size: int, port: int) -> None:
    launch({"pipeline": 3})
    wrapper, misused = PipelineSharedModuleWrapper([2, 0]), PipelineSharedModuleWrapper([2, 0])
    assert wrapper.pipeline_ranks == [0, 2]
    torch.manual_seed(rank)
    layer = nn.Linear(2, 3)
    if rank == 1:
        with pytest.raises(
            ValueError, match=r"rank 1 registers Linear as shared by the pipeline ranks \[0, 2\]"
        ):
            misused.register_module(layer)
    else:
        wrapper.register_module(layer)
        with pytest.raises(ValueError, match="a parameter is shared already"):
            wrapper.register_parameter(layer.bias)
    torch.manual_seed(0)
    same = [torch.equal(a, b) for a, b in zip(layer.parameters(), nn.Linear(2, 3).parameters(), strict=True)]
    assert same == ([False, False] if rank == 1 else [True, True])  # the values of the first stage
    other = PipelineSharedModuleWrapper([0, 2])
    if rank != 1:
        wide = nn.Linear(2, 3 + rank)
        with pytest.raises(
            ValueError, match=r"theirs differ in \(shape, dtype, layout\): rank 0: .*; rank 2: "
        ):
            other.register_module(wide)
    wrong: list[Any] = [[0, 3], [-1, 0], "01", ["0", "1"], [0.5], [0, True], [[0, 1]], [], None, 1]
    for ranks in wrong:
        told = rf"of 0 to 2 here, such as \[0, 2\]; got {re.escape(repr(ranks))}"
        with pytest.raises(ValueError, match=told):
            PipelineSharedModuleWrapper(ranks)


def test_shared_modules() -> None:
    spawn(check_wrapper, 3)


def test_shared_by_one_stage_is_a_plain_module() -> None:
    wrapper = PipelineSharedModuleWrapper([0, 0])  # page 11 in a pipeline of one stage
    layer = nn.Linear(2, 2)
    wrapper.register_module(layer)
    assert not hasattr(layer.weight, SHARED_GROUP)


def test_gpt3_on_a_rank_that_does_not_exist() -> None:
    """Half precision weights of GPT-3 take 350 GB; without memory, the first of 24 stages has the layers it
    should.
    """
    with fake_launch({"parallel": {"pipeline": 24}}, 0, 24), torch.device("meta"):
        stage = pipeline_gpt1d.GPT3_pipeline_1D(dtype=torch.half)
    h = 12288
    assert sum(p.numel() for p in stage.parameters()) == (50304 + 2048) * h + 4 * (12 * h**2 + 13 * h)
    assert {p.dtype for p in stage.parameters()} == {torch.half}


def test_names_of_the_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    built: dict[str, Any] = {}
    monkeypatch.setattr(
        pipeline_gpt, "build_gpt_pipeline", lambda depth, chunks, **kw: built.update(kw, depth=depth)
    )
    for name, depth in (("GPT2_small", 12), ("GPT2_exlarge", 48), ("GPT3", 96)):
        for mode in ("1D", "hybrid"):
            getattr(pipeline_gpt, f"{name}_pipeline_{mode}")(
                checkpoint=True, embed_split_hidden=True, fused=True, tied=False
            )
            assert built["depth"] == depth
            assert not built["tied"]
            assert all(
                built[word] for word in ("checkpoint", "embed_split_hidden", "fuse_scale_mask_softmax")
            )
