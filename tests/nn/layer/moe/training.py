"""A model with experts, trained on one rank and on several; the results as the serial model has them.

A step takes ``MICRO`` micro-batches, whose tokens are routed together.  The ranks of data and experts hold
parts of each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import colossalai
from colossalai.booster import Booster
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.mesh import serial_tensor
from colossalai.mesh.mesh import DATA_AXES
from colossalai.nn.layer.moe import FFNExperts, MoeLayer, MoeRouter
from colossalai.nn.loss import MoeLoss
from colossalai.nn.sequence import current_sequence
from colossalai.pipeline.stage import Placement
from colossalai.testing.pipelined import cut
from colossalai.utils import checkpoint

WIDTH, INNER, EXPERTS, SAMPLES, LENGTH, MICRO, STEPS = 8, 16, 4, 4, 6, 2, 2
CLIP = 0.5


@dataclass(frozen=True)
class Task:
    k: int = 2
    capacity: float = 1.0
    clip: bool = False
    recompute: str = ""
    """``"full"``, ``"selective"`` or ``"reentrant"``: blocks are checkpoints."""
    bias_rate: float = 0.0
    experts: int = EXPERTS


class Block(nn.Module):
    def __init__(self, task: Task) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        router = MoeRouter(task.k, task.capacity, min_capacity=0, bias_rate=task.bias_rate)
        self.moe = MoeLayer(WIDTH, task.experts, router, FFNExperts(task.experts, WIDTH, INNER))
        self.recompute = task.recompute

    def forward(self, x: Tensor) -> Tensor:
        if not self.recompute:
            return self._run(x)
        kept, reentrant = self.recompute == "selective", self.recompute == "reentrant"
        return checkpoint(self._run, False, x, use_reentrant=reentrant, keep_products=kept)  # type: ignore[no-any-return]

    def _run(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))


class Enter(nn.Linear):
    """The first layer, which cuts sequences where the job does."""

    def forward(self, x: Tensor) -> Tensor:
        sequence = current_sequence()
        return super().forward(x if sequence is None else sequence.cut(x))


class Leave(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        sequence = current_sequence()
        y = super().forward(x)
        return y if sequence is None else sequence.gather(y, LENGTH)


def build(task: Task) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Enter(WIDTH, WIDTH), Block(task), Block(task), Leave(WIDTH, WIDTH)).double()


def criterion() -> MoeLoss:
    return MoeLoss(0.3, nn.MSELoss, z_weight=0.05)


def data() -> list[list[tuple[Tensor, Tensor]]]:
    """For each step the micro-batches of all ranks."""
    torch.manual_seed(1)
    shape = STEPS, MICRO, 2, SAMPLES, LENGTH, WIDTH
    return [[(x, y) for x, y in step] for step in torch.randn(shape, dtype=torch.float64)]


@dataclass
class Trained:
    losses: list[Tensor] = field(default_factory=list)
    loads: list[Tensor] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def note(self, loss: Tensor) -> None:
        self.losses.append(loss.detach())


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def serial(task: Task) -> Trained:
    model, loss_of, trained = build(task), criterion(), Trained()
    watch_loads(model, trained)
    optimizer = sgd(model.parameters())
    for step in data():
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for x, y in step:
            loss = loss_of(model(x), y) / MICRO
            loss.backward()
            total += loss.detach()
        if task.clip:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        trained.note(total)
    trained.weights = dict(model.state_dict())
    return trained


def watch_loads(model: nn.Module, trained: Trained) -> None:
    for module in model.modules():
        if isinstance(module, MoeRouter):
            module.register_forward_hook(lambda m, args, routing: trained.loads.append(routing.loads.tokens))


def launch(task: Task, parallel: dict[str, Any], **config: Any) -> None:
    clip = {"clip_grad_norm": CLIP} if task.clip else {}
    config = {"parallel": parallel, **clip, **config}
    colossalai.launch_from_torch(config, backend="gloo", verbose=False)  # several ranks may share a GPU


def own(x: Tensor) -> Tensor:
    """This rank's samples of a micro-batch."""
    mesh = gpc.mesh
    ranks = mesh.ranks(*[axis for axis in mesh.size if axis in DATA_AXES])
    return x.chunk(len(ranks))[ranks.index(mesh.rank)]


def mean(loss: Tensor) -> Tensor:
    """The loss of all samples, of which each data rank has that of its own."""
    total = loss.clone()
    torch.distributed.all_reduce(total, group=gpc.get_group(ParallelMode.DATA))
    return total / gpc.get_world_size(ParallelMode.DATA)


def by_engine(task: Task, device: str = "cpu") -> Trained:
    model, trained = build(task).to(device), Trained()
    engine, *_ = colossalai.initialize(model, sgd(model.parameters()), criterion(), verbose=False)
    watch_loads(model, trained)
    for step in data():
        total = torch.zeros((), dtype=torch.float64)
        for x, y in step:
            engine.zero_grad()
            loss = engine.criterion(engine(own(x).to(device)), own(y).to(device))
            engine.backward(loss)
            engine.step()
            total += mean(loss.detach()).cpu()
        trained.note(total / MICRO)
    trained.loads = [load.cpu() for load in trained.loads]
    trained.weights = {name: value.cpu() for name, value in whole(model).items()}
    return trained


def by_pipeline(task: Task) -> Trained:
    stages = cut(
        build(task), Placement(gpc.pipeline_parallel_size), gpc.get_local_rank(ParallelMode.PIPELINE)
    )
    model, trained = stages[0], Trained()
    watch_loads(model, trained)
    engine, *_ = colossalai.initialize(model, sgd(model.parameters()), criterion(), verbose=False)
    for step in data():
        batch = tuple(torch.cat([own(pair[i]) for pair in step]) for i in (0, 1))
        engine.zero_grad()
        _, _, loss = engine.execute_schedule(iter([batch]))
        engine.step()
        if loss is not None:
            trained.note(mean(loss))
    trained.weights = whole(model)
    return trained


def by_booster(task: Task, make_plugin: Callable[[], Any], folder: Path, run: str = "") -> Trained:
    """Micro-batches are accumulated; each is averaged, as plugins without ``no_sync`` do.

    The weights are those of a file in ``folder``; ``run`` is the name of a checkpoint of the whole run.
    """
    model, trained = build(task).float(), Trained()
    booster = Booster(plugin=make_plugin(), device="cpu")
    boosted, optimizer, loss_of, *_ = booster.boost(model, sgd(model.parameters()), criterion())
    watch_loads(boosted, trained)
    for step in data():
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for x, y in step:
            loss = loss_of(boosted(own(x).float()), own(y).float()) / MICRO
            booster.backward(loss, optimizer)
            total += mean(loss.detach()).double()
        if task.clip:
            optimizer.clip_grad_by_norm(CLIP)
        optimizer.step()
        trained.note(total)
    booster.save_model(boosted, folder / "model.bin")
    if run:
        booster.save(folder / run)
    torch.distributed.barrier()
    saved = torch.load(folder / "model.bin", weights_only=True)
    trained.weights = {name: value.double() for name, value in saved.items()}
    return trained


def whole(model: nn.Module) -> dict[str, Tensor]:
    found = {name: serial_tensor(p.detach(), p, gpc.mesh) for name, p in model.named_parameters()}
    return {**found, **dict(model.named_buffers())}


def compare(got: Trained, want: Trained, *, rtol: float = 1e-8, loads: bool = True) -> None:
    close: dict[str, Any] = {"rtol": rtol, "atol": rtol / 100}
    if got.losses:  # the last stage has it
        torch.testing.assert_close(torch.stack(got.losses), torch.stack(want.losses), **close)
    if loads:
        assert len(got.loads) == len(want.loads), "a recomputation has routed anew"
        for mine, theirs in zip(got.loads, want.loads, strict=True):
            assert torch.equal(mine, theirs)
    for name, value in got.weights.items():
        torch.testing.assert_close(
            value, want.weights[name], msg=lambda text, n=name: f"{n}: {text}", **close
        )
