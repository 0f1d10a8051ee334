"""A training script as habits see it: the same lines on plain PyTorch, under a ``Booster`` and with an
``Engine``.

What a habit looks at is written down with ``see`` and its relatives, and compared with what the serial script
has seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from colossalai.interface import below_compile
from colossalai.mesh import placement
from colossalai.testing.boosted import whole_tensor
from tests.habits.habit import Habit
from tests.habits.models import batches_of, build

GLOBAL_BATCH, STEPS = 8, 8

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    # not Adam: it would hide gradients that are wrong by a factor
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-3),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=2),
}


class CannotBeWritten(Exception):
    """This plan has no place for the habit: in a pipeline, nobody calls the model."""


@dataclass
class Seen:
    """Something that the script looked at; ``mean`` is compared as the mean over the ranks."""

    label: str
    value: Any
    kind: str = "same"  # "same", "mean" or "each"
    of: Callable[[Tensor], Any] | None = None  # of "each": what was taken of each tensor


class Script:
    """The serial script, on the joined batch; plans derive from it.

    Args:
        folder: where it may save.
    """

    serial = True
    rank, world_size = 0, 1
    replicas = 1
    """Over how many ranks a batch is dealt."""

    def __init__(self, habit: Habit, folder: Path) -> None:
        self.habit, self.folder = habit, folder
        self.seen: list[Seen] = []
        self.pieces = False
        self.final: Seen | None = None
        self._batches = iter(batches_of(habit.model, STEPS, GLOBAL_BATCH))
        self.model: Any = None
        self.optimizer: Any = None
        self.scheduler: Any = None

    # The script

    def begin(self) -> None:
        """What stands before the model is built."""

    def build(self) -> nn.Module:
        return build(self.habit.model)

    def make_optimizer(self, params: Any) -> Optimizer:
        return OPTIMIZERS[self.habit.optimizer](params)

    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: Callable[[Optimizer], Any] | None = None,
    ) -> None:
        """What ``boost`` does, with an optimizer of ours unless one is given."""
        optimizer = optimizer or self.make_optimizer(model.parameters())
        self.wrap(model, optimizer, scheduler(optimizer) if scheduler else None)

    def wrap(self, model: nn.Module, optimizer: Optimizer, scheduler: Any) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler

    def batch(self) -> tuple[Tensor, Tensor]:
        """This rank's part of the next batch."""
        x, y = next(self._batches)
        return x.chunk(self.replicas)[self.rank % self.replicas], y.chunk(self.replicas)[
            self.rank % self.replicas
        ]

    def loss(self, batch: tuple[Tensor, Tensor], **options: Any) -> Tensor:
        """A forward pass of the script's own, and its loss."""
        return loss_of(self.habit.model, self.model, batch, **options)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def passes(self, batch: tuple[Tensor, Tensor] | None = None, weight: float = 1.0) -> None:
        """One forward and backward pass, as the plan writes them."""
        loss = self.loss(batch or self.batch())
        self.mean("loss", loss if weight == weight else 0.0)
        self.backward(loss * weight if weight != 1.0 else loss)

    def step(self) -> None:
        self.optimizer.step()

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.passes()
            self.step()

    def unwrap(self) -> Any:
        return self.model if self.serial else self.model.unwrap()

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def by_hand(self) -> None:
        """Say that the habit calls the model itself, which nobody does in a pipeline."""

    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return below_compile(self.model).named_parameters()

    # What it looks at

    def see(self, label: str, value: Any) -> None:
        """Equal on every rank; None where this rank has nothing to look at."""
        self.seen.append(Seen(label, _copy(value)))

    def mean(self, label: str, value: Any) -> None:
        """A value of this rank's part of the batch, whose mean over the ranks is the serial one."""
        self.seen.append(
            Seen(label, None if value is None else float(torch.as_tensor(value).detach()), "mean")
        )

    def each(self, what: str, of: Callable[[Tensor], Any] = lambda t: t) -> None:
        """``of`` every parameter (``what="weight"``) or its gradient (``"grad"``)."""
        self.seen.append(self._each(what, of))

    def _each(self, what: str, of: Callable[[Tensor], Any] = lambda t: t, named: Any = None) -> Seen:
        found: dict[str, Any] = {}
        for name, p in named or self.named():
            tensor: Any = p if what == "weight" else p.grad
            if self.serial:
                copied = None if tensor is None else tensor.detach().clone().requires_grad_(p.requires_grad)
                found[name] = (copied, None)
            else:
                value = None if tensor is None else of(tensor)
                found[name] = (_copy(value), placement(p))
        return Seen(what, found, "each", of)

    def state(self, label: str, state: dict[str, Any] | None, alone: bool = False) -> None:
        """A state dict, of which this rank may have a part or nothing; ``alone``: other ranks do not look at
        theirs.
        """
        if alone and any(hasattr(tensor, "full_tensor") for tensor in (state or {}).values()):
            state, self.pieces = {}, True  # it holds this rank's parts, and says so by its class
        layouts = (
            {}
            if self.serial
            else {n: placement(p) for n, p in self.model.named_parameters(remove_duplicate=False)}
        )
        found = {name: (_copy(tensor), layouts.get(name)) for name, tensor in (state or {}).items()}
        self.seen.append(Seen(label, found, "each", lambda t: t))

    def weights(self) -> dict[str, Tensor] | None:
        """All weights and buffers at the end, whole; None on ranks that have none."""
        return {name.removeprefix("_orig_mod."): _copy(t) for name, t in self.model.state_dict().items()}

    def agreement(self) -> None:
        """Look at the weights of this rank at the end, where they are whole or a piece of the serial ones."""
        named = below_compile(self.model).named_parameters(remove_duplicate=not self.serial)
        self.final = self._each("weight", named=named)


def loss_of(kind: str, model: Any, batch: tuple[Tensor, Tensor], **options: Any) -> Tensor:
    x, y = batch
    if kind == "gpt2":
        return model(input_ids=x, labels=y, **options).loss
    return F.cross_entropy(model(x, **options), y)


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.detach()
        return (whole_tensor(value) if hasattr(value, "full_tensor") else value).clone()
    return value
