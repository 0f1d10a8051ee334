"""The models and batches of this folder, and the measurement of a step."""

from __future__ import annotations

import argparse
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from colossalai.auto_parallel.checkpoint import CheckpointPlan, CheckpointPlanner
from colossalai.device.presets import device_preset
from colossalai.utils.text import bytes_of
from titans.model import resnet

MB = 2**20


class Work(NamedTuple):
    """A model, a batch and the loss of the output; without a criterion, the model computes its loss."""

    model: nn.Module
    batch: Any
    criterion: nn.Module | None


def image_work(name: str, images: int, pixels: int = 224) -> Work:
    model = getattr(resnet, name)(num_classes=1000)
    batch = (
        torch.rand(1, 3, pixels, pixels).expand(images, -1, -1, -1),
        torch.zeros(images, dtype=torch.long),
    )
    return Work(model, batch, nn.CrossEntropyLoss())


def gpt2_work(sequences: int, length: int = 1024, layers: int = 12) -> Work:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=layers))
    ids = torch.zeros(sequences, length, dtype=torch.long)
    return Work(model, {"input_ids": ids, "labels": ids}, None)


def build_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--device",
        type=device,
        default="predict:h200",
        help="cuda: run every step on the GPU; predict:NAME: compute memory and time for that device, also"
        " without a GPU (%(default)s)",
    )
    return parser


def count(text: str) -> int:
    """A number of an option, at least 1."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, at least 1, got {text!r}")
    return int(text)


def size(text: str) -> str:
    """A number of bytes, or a text such as ``20 GiB``."""
    try:
        bytes_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def device(text: str) -> str:
    """``cuda`` where there is a GPU, or ``predict:NAME`` of a device that is known."""
    if text == "cuda":
        if not torch.cuda.is_available():
            raise argparse.ArgumentTypeError(
                "cuda needs a GPU, and there is none; take predict:h200, which computes its steps"
            )
        return text
    try:
        device_preset(text.removeprefix("predict:"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; write cuda, or predict:h200") from None
    return text


def planner_of(work: Work, device: str) -> CheckpointPlanner:
    """What plans the steps of ``work``: on the GPU, or for the device after ``predict:``."""
    if device == "cuda":
        model = work.model
        if any(p.is_meta for p in model.parameters()):
            model = model.to_empty(device="cuda")
            for p in model.parameters():
                nn.init.normal_(p, std=0.02)
        work = work._replace(model=model.cuda(), batch=tree_map_only(Tensor, Tensor.cuda, work.batch))
    preset = None if device == "cuda" else device.removeprefix("predict:")
    return CheckpointPlanner(work.model, work.batch, criterion=work.criterion, device=preset)


def peak_and_seconds(planner: CheckpointPlanner, plan: CheckpointPlan, repeat: int = 5) -> tuple[int, float]:
    """What a step needs with ``plan``: measured on the GPU, or as it was predicted."""
    if planner.place.type != "cuda":
        return plan.peak, plan.seconds
    planner.apply(plan)
    step, times = planner.step, []
    for _ in range(repeat):
        step.model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        step.loss(step.model, step.batch).backward()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return torch.cuda.max_memory_allocated(), sorted(times)[len(times) // 2]
