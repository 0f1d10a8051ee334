"""A token-wise model whose first module cuts the sequence, and its plans: what row axes mean, without
attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import (
    GeminiPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.core import global_context as gpc
from colossalai.mesh.gradient_norm import clip_factor
from colossalai.mesh.rows import averaging_axes
from colossalai.nn.sequence import current_sequence
from colossalai.testing.boosted import BoosterRun
from colossalai.testing.parity import Problem, SerialRun
from tests.pipeline.plans import HIDDEN, Block, to_tensor_parallel
from tests.rows.experts import Experts

WORDS, LENGTH, CLIP = 16, 8, 0.2


class Cut(nn.Module):
    """The entry of the model: this rank's part of the sequence, once ``is_cut``."""

    is_cut = False

    def forward(self, tokens: Tensor) -> Tensor:
        sequence = current_sequence() if self.is_cut else None
        return tokens if sequence is None else sequence.cut(tokens)


def token_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """The mean over the tokens of the whole sequences, also from the scores of a part."""
    sequence = current_sequence() if scores.size(1) < labels.size(1) else None
    if sequence is None:
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())
    own = F.cross_entropy(scores.flatten(0, 1), sequence.cut(labels).flatten(), reduction="sum")
    return sequence.total(own / labels.numel())


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        Cut(), nn.Embedding(WORDS, HIDDEN), Block(), nn.LayerNorm(HIDDEN), Block(), nn.Linear(HIDDEN, WORDS)
    )


def to_plan(module: nn.Module) -> nn.Module:
    """A module of ``build`` under the launched plan."""
    if isinstance(module, Cut):
        module.is_cut = True
    if isinstance(module, Experts):
        module.share_out(gpc.mesh)
    if isinstance(module, Block) and gpc.plan.mode == "1d":
        return to_tensor_parallel(module)
    return module


def differing(module: nn.Module) -> nn.Module:
    """The same with other values on all ranks but the first that hold the same: the plan must bring those to
    all.
    """
    module = to_plan(module)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(sum(gpc.mesh.coord[axis] for axis in averaging_axes(p, gpc.mesh)))
    return module


def build_experts(experts: tuple[int, ...], open_: int | None) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for n in experts for layer in (Experts(HIDDEN, n, open_), Block())]
    return nn.Sequential(Cut(), nn.Embedding(WORDS, HIDDEN), *layers, nn.Linear(HIDDEN, WORDS))


def decaying(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer for which a gradient of zeros is not the same as none."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def problem(steps: int = 3, batch: int = 8) -> Problem:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(WORDS, (2, batch, LENGTH), generator=generator) for _ in range(steps)]
    return Problem(
        build=build,
        batches=[(x, y) for x, y in ids],
        loss=lambda model, pair: token_loss(model(pair[0]), pair[1]),
        optimizer=sgd,
    )


def experts_problem(
    experts: tuple[int, ...] = (4,), open_: int | None = None, optimizer: Any = decaying
) -> Problem:
    """Layers of ``experts``, of which the first ``open_`` get tokens, by default all."""
    task, make = problem(batch=16), partial(build_experts, experts, open_)
    return Problem(build=make, batches=task.batches, loss=task.loss, optimizer=optimizer)


def launch(**parallel: Any) -> None:
    others = {key: parallel.pop(key) for key in tuple(parallel) if not key.islower() or key in OTHERS}
    colossalai.launch_from_torch({"parallel": parallel, **others}, backend="gloo", verbose=False)


OTHERS = ("gradient_handler", "zero", "clip_grad_norm", "gradient_accumulation", "torch_ddp")


class CutRun(BoosterRun):
    """The problem under a plugin; ranks start from different weights, if ``differ``."""

    def __init__(self, task: Problem, plugin: Plugin, *, differ: bool = True, **options: Any) -> None:
        self.differ = differ
        super().__init__(task, Booster(device="cpu", plugin=plugin), **options)

    def build(self) -> nn.Module:
        model = super().build()
        change = differing if self.differ else to_plan
        for i, module in enumerate(model):  # type: ignore[arg-type]
            model[i] = change(module)  # type: ignore[operator]
        return model


class ClippedSerial(SerialRun):
    def update(self) -> None:
        factor = clip_factor(self.gradient_norm(), CLIP)
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad *= factor
        super().update()


def clip(optimizer: Any) -> None:
    optimizer.clip_grad_by_norm(CLIP)


ZERO = {"precision": "fp32"}
SMALL = {"search_range_mb": 0.01, "min_chunk_size_mb": 0.001, "hidden_dim": 8}
GEMINI = partial(GeminiPlugin, device="cpu", pin_memory=False, **ZERO, **SMALL)
PLUGINS: dict[str, Callable[[], Plugin]] = {
    "ddp": TorchDDPPlugin,
    "zero1": partial(LowLevelZeroPlugin, stage=1, **ZERO),
    "zero2": partial(LowLevelZeroPlugin, stage=2, **ZERO),
    "gemini": GEMINI,
    "fsdp": partial(TorchFSDPPlugin, sync_module_states=True),
}
MORE_PLUGINS: dict[str, Callable[[], Plugin]] = {
    "zero1-host": partial(LowLevelZeroPlugin, stage=1, cpu_offload=True, **ZERO),
    "zero2-small": partial(LowLevelZeroPlugin, stage=2, reduce_bucket_size_in_m=1e-4, **ZERO),
    "gemini-auto": partial(GEMINI, placement_policy="auto"),
    "gemini-device": partial(GEMINI, placement_policy="cuda"),
    "gemini-strict": partial(GEMINI, strict_ddp_mode=True),
    "gemini-late": partial(GEMINI, update_in_backward=False),
    "gemini-early": partial(GEMINI, update_in_backward=True),
    "gemini-taken-back": partial(GEMINI, update_in_backward=True, max_norm=CLIP, undo_ratio=1.0),
}


UNCLIPPED = ("gemini-early", "gemini-taken-back")  # the first is not clipped, the second in its step


def check_trained(task: Problem, plugin: str, folder: str, **options: Any) -> CutRun:
    """Train under ``plugin`` and serially, with clipping; compare losses, norms and the weights that are
    saved.  For plans that show no gradients.
    """
    made = (PLUGINS | MORE_PLUGINS)[plugin]()
    options = {"clip": None if plugin in UNCLIPPED else clip} | options
    run, serial = (
        CutRun(task, made, **options),
        (SerialRun if plugin == "gemini-early" else ClippedSerial)(task),
    )
    for batch in task.batches:
        close(run.forward_backward(batch), serial.forward_backward(batch))
        if plugin not in UNCLIPPED:
            close(run.gradient_norm(), serial.gradient_norm())
        run.update()
        serial.update()
    close_weights(saved_weights(run.booster, run.model, folder), serial)
    return run


def saved_weights(booster: Booster, model: nn.Module, folder: str) -> dict[str, Tensor]:
    """As a file of the serial model has them, whatever the plan keeps."""
    path = Path(folder) / f"{type(booster.plugin).__name__}.bin"
    booster.save_model(model, path)
    dist.barrier()
    saved: dict[str, Tensor] = torch.load(path, weights_only=True)
    dist.barrier()
    return saved


def close_weights(got: dict[str, Tensor], serial: SerialRun) -> None:
    assert got.keys() == serial.model.state_dict().keys()
    for name, expected in serial.model.state_dict().items():
        close(got[name], expected, name)


def close(got: Tensor, expected: Tensor, name: str = "") -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5, msg=lambda text: f"{name}: {text}")


def save_run(
    rank: int,
    world_size: int,
    port: int,
    folder: str,
    plugin: str,
    plan: dict[str, Any],
    make: Callable[[], Problem] = problem,
) -> None:
    """Train two steps and save the run."""
    launch(**plan)
    task = make()
    run = CutRun(task, PLUGINS[plugin](), clip=clip)
    for batch in task.batches[:2]:
        run.forward_backward(batch)
        run.update()
    run.booster.save(folder)


def go_on(
    rank: int,
    world_size: int,
    port: int,
    folder: str,
    plugin: str,
    plan: dict[str, Any],
    make: Callable[[], Problem] = problem,
) -> None:
    """Load the run, train the third step, and compare with the serial model."""
    launch(**plan)
    task = make()
    serial = ClippedSerial(task)
    for batch in task.batches:
        serial.forward_backward(batch)
        serial.update()
    run = CutRun(task, PLUGINS[plugin](), clip=clip)
    run.booster.load(folder)
    run.forward_backward(task.batches[2])
    run.update()
    close_weights(saved_weights(run.booster, run.model, f"{folder}-end"), serial)
