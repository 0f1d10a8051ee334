"""A GPT with tied embedding and head, trained in a pipeline through ``initialize``, equals the serial one.

The grid is that of every schedule, stages, micro-batches, chunks, tensor mode and data parallelism, with
clipping, with stages of unequal depth, and with activation checkpoints in every other case.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.testing import parametrize_sample, spawn
from tests.titans.test_pipeline import GPT_SIZES, whole
from titans.loss.lm_loss import GPTLMLoss
from titans.model.gpt import GPT
from titans.model.pipeline_gpt import build_gpt_pipeline

STEPS, CLIP = 3, 0.5
CHUNKS = {"gpipe": (1, 2), "1f1b": (1,), "interleaved": (1, 2), "zbh1": (1,), "zbv": (2,)}
MODES = {None: 1, "1d": 2, "2d": 4}
NAMES = "schedule, stages, microbatches, chunks, mode, data"

CASES = [
    (schedule, stages, microbatches, chunks, mode, data)
    for mode, (schedule, all_chunks) in itertools.product(MODES, CHUNKS.items())
    for stages, microbatches, chunks, data in itertools.product((2, 3, 4), (1, 4, 8), all_chunks, (1, 2))
    if schedule != "interleaved" or microbatches % stages == 0
]


def ranks_of(case: tuple[Any, ...]) -> int:
    return case[1] * MODES[case[4]] * case[5]


SMALL = [case for case in CASES if ranks_of(case) <= 8]  # ranks that a laptop starts in a second
LARGE = [case for case in CASES if ranks_of(case) > 8]


@parametrize_sample(NAMES, SMALL, n=3)
def test_tied_gpt_trains_as_the_serial_one(
    schedule: str, stages: int, microbatches: int, chunks: int, mode: str | None, data: int
) -> None:
    train(schedule, stages, microbatches, chunks, mode, data)


def test_both_ends_of_the_model_on_one_rank() -> None:
    train("zbv", 2, 4, 2, None, 1)


@pytest.mark.slow
@pytest.mark.parametrize(NAMES.split(", "), LARGE)
def test_tied_gpt_on_many_ranks(
    schedule: str, stages: int, microbatches: int, chunks: int, mode: str | None, data: int
) -> None:
    train(schedule, stages, microbatches, chunks, mode, data)


def train(schedule: str, stages: int, microbatches: int, chunks: int, mode: str | None, data: int) -> None:
    parallel: dict[str, Any] = {"pipeline": {"size": stages, "schedule": schedule}}
    if mode is not None:
        parallel["tensor"] = {"size": MODES[mode], "mode": mode}
    config = {"parallel": parallel, "NUM_MICRO_BATCHES": microbatches, "NUM_CHUNKS": chunks}
    checkpoint = (stages + microbatches + chunks + data) % 2 == 0
    spawn(check, stages * MODES[mode] * data, timeout=300, config=config, data=data, checkpoint=checkpoint)


@dataclass
class Serial:
    """What training the whole model gives: the losses of the parts of the batch in each step, gradients,
    weights.
    """

    losses: list[list[float]]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def train_serially(depth: int, parts: Sequence[Tensor]) -> Serial:
    torch.manual_seed(0)
    model = GPT(depth=depth, **GPT_SIZES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    named = {**dict(model.named_parameters()), "head.dense.weight": model.head.dense.weight}
    history = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = torch.stack([GPTLMLoss()(model(part), part) for part in parts])
        losses.mean().backward()
        history.append(losses.tolist())
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return Serial(history, gradients, {name: p.detach() for name, p in named.items()})


def check(rank: int, world_size: int, port: int, config: dict[str, Any], data: int, checkpoint: bool) -> None:
    torch.set_num_threads(1)
    chunks = config["NUM_CHUNKS"]
    rows = 2 * config["NUM_MICRO_BATCHES"] * data  # mode 2d cuts a micro-batch into 2
    ids = torch.randint(GPT_SIZES["vocab_size"], (rows, 8), generator=torch.Generator().manual_seed(1))
    depth = config["parallel"]["pipeline"]["size"] * chunks + 1  # one stage has two layers
    serial = train_serially(depth, ids.chunk(data))
    colossalai.launch_from_torch(config=config | {"clip_grad_norm": CLIP}, backend="gloo", verbose=False)
    torch.manual_seed(0)
    model = build_gpt_pipeline(depth, chunks, checkpoint=checkpoint, **GPT_SIZES)
    parts = list(model) if chunks > 1 else [model]  # type: ignore[call-overload]
    named = [(name, p) for part in parts for name, p in part.named_parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = colossalai.initialize(model, optimizer, GPTLMLoss(), verbose=False)
    engine.train()
    place = gpc.get_local_rank(ParallelMode.DATA)
    own = ids.chunk(data)[place]

    def forward_backward(step: int) -> None:
        engine.zero_grad()
        _, _, loss = engine.execute_schedule(iter([({"input_ids": own}, own)]), return_output_label=False)
        assert (loss is not None) is gpc.is_pipeline_last_stage(ignore_virtual=True)
        if loss is not None:
            assert loss.item() == pytest.approx(serial.losses[step][place], rel=1e-5)

    forward_backward(0)
    for handler in engine.gradient_handlers:
        handler.handle_gradient()
    for name, p in named:
        assert p.grad is not None
        torch.testing.assert_close(whole(p, p.grad), serial.gradients[name], rtol=1e-4, atol=1e-6)
    for step in range(STEPS):
        forward_backward(step)
        engine.step()
    for name, p in named:
        torch.testing.assert_close(whole(p, p), serial.weights[name], rtol=1e-4, atol=1e-6)
    gpc.destroy()
