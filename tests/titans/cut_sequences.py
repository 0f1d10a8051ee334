"""Small models of the zoo, and how they train where sequences are cut, to compare them with serial ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import colossalai
from colossalai.booster import Booster
from colossalai.core import global_context as gpc
from colossalai.nn import CrossEntropyLoss
from colossalai.testing.boosted import BoosterRun
from colossalai.testing.parity import ParityRun, Problem
from colossalai.testing.pipelined import PipelineRun
from tests.rows.plans import PLUGINS, close, sgd
from titans.loss.lm_loss import GPTLMLoss
from titans.model.bert import BERT
from titans.model.gpt import GPT
from titans.model.pipeline_bert import build_bert_pipeline
from titans.model.pipeline_gpt import build_gpt_pipeline
from titans.model.pipeline_vit import build_pipeline_vit
from titans.model.vit import VisionTransformer

WORDS, DEPTH, ROWS = 2053, 2, 4  # more words than a head has whole on every rank under 1D
SIZES: dict[str, Any] = {"hidden_size": 16, "num_heads": 8, "dropout": 0.0, "attention_dropout": 0.0}
TEXT: dict[str, Any] = {**SIZES, "vocab_size": WORDS, "max_position_embeddings": 16}
IMAGE: dict[str, Any] = {**SIZES, "patch_size": 4, "num_classes": 5}

PIPELINES: dict[str, Callable[..., nn.Module]] = {
    "gpt": build_gpt_pipeline,
    "bert": build_bert_pipeline,
    "vit": build_pipeline_vit,
}


def sizes(family: str, length: int) -> dict[str, Any]:
    if family == "vit":  # one row of patches, with the class token
        return {**IMAGE, "img_size": 4 * max(1, round((length - 1) ** 0.5))}
    return {**TEXT, "embedding_dropout": 0.0} if family == "gpt" else TEXT


def build(family: str, length: int, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    kind = {"gpt": GPT, "bert": BERT, "vit": VisionTransformer}[family]
    return kind(depth=DEPTH, **{**sizes(family, length), **changes})


def problem(family: str, length: int, padding: str = "none", steps: int = 2, **changes: Any) -> Problem:
    """``padding``: none, or some of every row, on the left or on the right."""
    generator = torch.Generator().manual_seed(1)

    def batch() -> tuple[Any, Tensor]:
        if family == "vit":
            size = sizes(family, length)["img_size"]
            labels = torch.randint(5, (ROWS,), generator=generator)
            return torch.randn(ROWS, 3, size, size, generator=generator), labels
        ids = torch.randint(WORDS, (ROWS, length), generator=generator)
        if padding == "none":
            return {"input_ids": ids}, ids
        mask = torch.ones_like(ids)
        # equally many in each row, so that the mean over replicas and micro-batches is that over all tokens
        mask[:, : (length - 1) // 2 + 1 - (length < 3)] = 0
        mask = mask if padding == "left" else mask.flip(1)
        return {"input_ids": ids, "attention_mask": mask}, ids.masked_fill(mask == 0, -100)

    def loss(model: nn.Module, pair: tuple[Any, Tensor]) -> Tensor:
        data, labels = pair
        scores = model(**data) if isinstance(data, dict) else model(data)
        whole = next(m for m in model.modules() if hasattr(m, "blocks")).sequence is None
        return by_torch(family, scores, labels) if whole else criterion(family)(scores, labels)

    return Problem(
        build=lambda: build(family, length, **changes),
        batches=[batch() for _ in range(steps)],
        loss=loss,
        optimizer=sgd,
    )


def criterion(family: str) -> nn.Module:
    return GPTLMLoss() if family == "gpt" else CrossEntropyLoss()


def by_torch(family: str, scores: Tensor, labels: Tensor) -> Tensor:
    if family == "gpt":
        scores, labels = scores[:, :-1], labels[:, 1:]
    return F.cross_entropy(scores.flatten(0, -2), labels.flatten())


def launch(parallel: dict[str, Any], **config: Any) -> None:
    torch.set_num_threads(1)
    colossalai.launch_from_torch({"parallel": parallel, **config}, backend="gloo", verbose=False)


class EngineRun(PipelineRun):
    """A problem of this file through ``colossalai.initialize``, as stages if the plan has several."""

    def __init__(self, task: Problem, family: str, length: int, **changes: Any) -> None:
        torch.manual_seed(0)
        model = PIPELINES[family](DEPTH, device=torch.device("cpu"), **{**sizes(family, length), **changes})
        self.names = {p: name for name, p in model.named_parameters()}
        optimizer = task.optimizer(model.parameters())
        self.engine, *_ = colossalai.initialize(model, optimizer, criterion(family), verbose=False)
        self.engine.train()

    def _everywhere(self, items: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
        found = super()._everywhere(items)
        table, head = "embed.word_embeddings.weight", "head.dense.weight"
        if {table, head} <= found.keys():  # of a tied model, which has it once
            close(found[table], found[head])
            del found[head]
        return found


def train_by(door: str, task: Problem, family: str, length: int, **changes: Any) -> ParityRun:
    """The problem under the launched plan: by the engine, or by the booster with a plugin."""
    if door == "engine":
        return EngineRun(task, family, length, **changes)
    assert gpc.pipeline_parallel_size == 1
    return BoosterRun(task, Booster(device="cpu", plugin=PLUGINS[door]()))
