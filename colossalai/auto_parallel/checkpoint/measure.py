"""Runs blocks on the GPU, each kind once in each mode: their times, and the workspaces of their kernels."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from colossalai.auto_parallel.checkpoint.blocks import block_modes
from colossalai.auto_parallel.checkpoint.mode_solver import ModeProblem
from colossalai.auto_parallel.checkpoint.profile import CallCost
from colossalai.auto_parallel.checkpoint.timeline import Like, Span, StepTimeline, TrainingStep

_WARM, _REPEAT = 2, 5


def measure_calls(
    step: TrainingStep, blocks: Mapping[str, nn.Module], played: Mapping[str, StepTimeline]
) -> dict[tuple[int, str], CallCost]:
    """The costs of every call in every mode; calls of the same kind are run once."""
    first = played["keep"]
    kinds: dict[str, dict[str, CallCost]] = {}
    found = {}
    for call, name in enumerate(first.calls):
        block, inputs = blocks[name], first.inputs[call]
        kind = f"{block!r} {inputs!r}"
        if kind not in kinds:
            kinds[kind] = {
                mode: _measure(step, name, inputs, mode, line.forward[call], line.backward.get(call, Span()))
                for mode, line in played.items()
            }
        found |= {(call, mode): cost for mode, cost in kinds[kind].items()}
    return found


def _measure(
    step: TrainingStep, name: str, inputs: Any, mode: str, forward: Span, backward: Span
) -> CallCost:
    """One block alone: its seconds, and the bytes that it needs beyond those that were played."""
    block = step.model.get_submodule(name)
    before = {key: value.clone() for key, value in block.named_buffers()}
    gradients = [p.grad for p in block.parameters()]
    device = next(block.parameters()).device
    try:
        with block_modes(step.model, {name: mode}), torch.random.fork_rng(devices=[device]):
            times, above = [], (0, 0)
            for number in range(_WARM + _REPEAT):
                seconds, above = _run(step, block, inputs, device)
                times += [seconds] if number >= _WARM else []
    finally:
        with torch.no_grad():
            for key, value in block.named_buffers():
                value.copy_(before[key])
        for p, gradient in zip(block.parameters(), gradients, strict=True):
            p.grad = gradient
    extra = [max(0, a - (p.peak - p.start)) for a, p in zip(above, (forward, backward), strict=True)]
    return CallCost(sorted(times)[len(times) // 2], *extra)


def _run(
    step: TrainingStep, block: nn.Module, inputs: Any, device: torch.device
) -> tuple[float, tuple[int, int]]:
    """Seconds of both passes, and the bytes that each needed above those alive when it began."""
    for p in block.parameters():
        p.grad = None
    args, kwargs = _made(inputs, device)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    alive = torch.cuda.memory_allocated(device)
    start = time.perf_counter()
    with step.autocasts("cuda"):
        output = block(*args, **kwargs)
    torch.cuda.synchronize(device)
    seconds, forward = time.perf_counter() - start, torch.cuda.max_memory_allocated(device) - alive
    learnt = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    gradients = [torch.ones_like(t) for t in learnt]
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    alive = torch.cuda.memory_allocated(device)
    start = time.perf_counter()
    if learnt:
        torch.autograd.backward(learnt, gradients)
    torch.cuda.synchronize(device)
    seconds += time.perf_counter() - start
    return seconds, (forward, torch.cuda.max_memory_allocated(device) - alive)


def _made(inputs: Any, device: torch.device) -> Any:
    """Arguments that look like those of a call; a key-value cache is left out."""

    def make(leaf: Any) -> Any:
        if isinstance(leaf, Like):
            return leaf.make(device)
        return None if hasattr(leaf, "get_seq_length") else leaf

    return tree_map(make, inputs, is_leaf=lambda leaf: isinstance(leaf, Like))


def measure_rest(step: TrainingStep, problem: ModeProblem, mode: str) -> float:
    """The seconds of a step outside of the blocks, which are all in ``mode``; predicted if it does not
    fit.
    """
    blocks = sum(stage.costs[mode].seconds for stage in problem.stages)
    gradients = [p.grad for p in step.model.parameters()]
    device = next(p.device for p in step.model.parameters())
    batch = tree_map_only(Tensor, lambda t: t.to(device), step.batch)
    buffers = {key: value.clone() for key, value in step.model.named_buffers()}
    times: list[float] = []
    with suppress(torch.OutOfMemoryError), torch.random.fork_rng(devices=[device]):
        for number in range(_WARM + _REPEAT):
            step.model.zero_grad(set_to_none=True)
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            with step.autocasts("cuda"):
                loss = step.loss(step.model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
            torch.cuda.synchronize(device)
            times += [time.perf_counter() - start] if number >= _WARM else []
    with torch.no_grad():
        for key, value in step.model.named_buffers():
            value.copy_(buffers[key])
    for p, gradient in zip(step.model.parameters(), gradients, strict=True):
        p.grad = gradient
    torch.cuda.empty_cache()
    return max(0.0, sorted(times)[len(times) // 2] - blocks) if times else problem.seconds
