"""Is this plan equal to the serial model?

A *problem* is an ordinary model with its data, loss and optimizer.  A *plan* is a function that turns a
problem into a *run*: the same training, spread over ranks.  ``check_plan`` trains the serial model beside the
run, on the same batches, and compares

- the initial weights, bit for bit,
- the loss, every gradient and the norm of all gradients at each step,
- the weights after the last step.

A new plan is one line in a table of plans; a user checks a model of their own in the same way::

    assert_equal_to_serial(my_problem, my_plan, nprocs=4)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from colossalai.mesh import Mesh, grad_norm, serial_tensor
from colossalai.testing._spawn import spawn


def _adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    # A larger eps than usual: some gradients are exactly zero in theory (the bias of attention's keys), and
    # Adam would blow their rounding errors up to full-sized steps.
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, eps=1e-4)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A training task on one device; every rank builds the same one."""

    build: Callable[[], nn.Module]
    """The model with its initial weights; calling it twice gives equal models."""
    batches: Sequence[Any]
    """Global batches, one for each step."""
    loss: Callable[[nn.Module, Any], Tensor]
    """The loss of the serial model on a global batch."""
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = _adamw


class ParityRun(Protocol):
    """One training run, however it is spread; tensors are reported whole, under the names of the serial
    model.
    """

    def weights(self) -> dict[str, Tensor]: ...

    def forward_backward(self, batch: Any) -> Tensor:
        """Loss of the whole global batch; gradients are left ready for ``update``."""
        ...

    def gradients(self) -> dict[str, Tensor]: ...

    def gradient_norm(self) -> Tensor: ...

    def update(self) -> None:
        """One optimizer step; gradients are cleared."""
        ...


Run = ParityRun  # its former name, which scripts may import
Plan = Callable[[Problem], ParityRun]


@dataclass(frozen=True)
class Tolerance:
    """The tolerated distance of a plan from the serial model; stated here once and never relaxed in
    passing.
    """

    loss: float = 1e-5
    gradient: float = 1e-4
    weight: float = 1e-4


FP32 = Tolerance()
# bf16 keeps 8 bits, and every product and sum of a layer rounds to them; for optimizers whose step is
# proportional to the gradient (Adam makes a whole step of one that is nothing but rounding); a weight that
# starts at zero is a sum of gradients
BF16 = Tolerance(loss=1e-2, gradient=1e-1, weight=1e-1)


class ParityError(AssertionError):
    """The plan and the serial model disagree."""


class SerialRun:
    """The reference: the problem as it is."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.model = problem.build()
        self.optimizer = problem.optimizer(self.model.parameters())

    def weights(self) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def forward_backward(self, batch: Any) -> Tensor:
        loss = self.problem.loss(self.model, batch)
        loss.backward()
        return loss.detach()

    def gradients(self) -> dict[str, Tensor]:
        return {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}

    def gradient_norm(self) -> Tensor:
        norms = [torch.linalg.vector_norm(g.float()) for g in self.gradients().values()]
        return torch.linalg.vector_norm(torch.stack(norms))

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class PlacedRun:
    """A model whose parameters carry their layouts on ``mesh`` (see :mod:`colossalai.mesh.parameter`)."""

    def __init__(
        self, problem: Problem, model: nn.Module, mesh: Mesh, loss: Callable[[nn.Module, Any], Tensor]
    ) -> None:
        self.model, self.mesh, self.loss = model, mesh, loss
        self.optimizer = problem.optimizer(model.parameters())

    def weights(self) -> dict[str, Tensor]:
        return {n: self._whole(p, p) for n, p in self.model.named_parameters()}

    def forward_backward(self, batch: Any) -> Tensor:
        loss = self.loss(self.model, batch)
        loss.backward()
        return loss.detach()

    def gradients(self) -> dict[str, Tensor]:
        return {n: self._whole(p.grad, p) for n, p in self.model.named_parameters() if p.grad is not None}

    def gradient_norm(self) -> Tensor:
        return grad_norm(self.model.parameters(), self.mesh)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _whole(self, piece: Tensor, param: Tensor) -> Tensor:
        return serial_tensor(piece, param, self.mesh).clone()


def check_plan(problem: Problem, plan: Plan, *, tolerance: Tolerance = FP32) -> None:
    """Train ``problem`` under ``plan`` and serially, on every rank of a launched job, and compare."""
    serial, run = SerialRun(problem), plan(problem)
    _compare_weights("initial weight", run.weights(), serial.weights(), None)
    for step, batch in enumerate(problem.batches):
        where = f"at step {step}"
        _compare(f"loss {where}", run.forward_backward(batch), serial.forward_backward(batch), tolerance.loss)
        _compare_weights(f"gradient {where} of", run.gradients(), serial.gradients(), tolerance.gradient)
        norms = run.gradient_norm(), serial.gradient_norm()
        # norms are computed in fp32, whatever the dtype of the gradients
        _compare(f"norm of all gradients {where}", *norms, max(tolerance.gradient, 1e-6))
        run.update()
        serial.update()
    _compare_weights("weight after the last step", run.weights(), serial.weights(), tolerance.weight)


def _compare_weights(
    what: str, got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float | None
) -> None:
    if got.keys() != expected.keys():
        missing, extra = sorted(expected.keys() - got.keys()), sorted(got.keys() - expected.keys())
        raise ParityError(
            f"{what}: the plan lacks {missing or 'nothing'} and has {extra or 'nothing'} in addition"
        )
    for name, tensor in expected.items():
        _compare(f"{what} {name!r}", got[name], tensor, tolerance)


def _compare(what: str, got: Tensor, expected: Tensor, tolerance: float | None) -> None:
    """Relative to the largest element: a gradient's small elements are sums in which large ones cancel."""
    if got.shape != expected.shape:
        raise ParityError(f"{what}: shape {tuple(got.shape)}, the serial model has {tuple(expected.shape)}")
    got, expected = got.detach().cpu(), expected.detach().cpu()
    if tolerance is None:
        if not torch.equal(got, expected):
            differ = int((got != expected).sum())
            raise ParityError(
                f"{what} is not bit-equal to the serial model's: {differ} of {got.numel()} elements differ"
            )
        return
    error = (got.double() - expected.double()).abs().amax() if got.numel() else torch.zeros(())
    scale = expected.double().abs().amax() if got.numel() else torch.ones(())
    # NaN on both sides compares as unequal: a plan that is as broken as its reference proves nothing
    if not error <= tolerance * scale.clamp(min=1e-6):
        ratio = float(error / scale.clamp(min=1e-30))
        raise ParityError(
            f"{what} differs from the serial model's by {float(error):.3e} where the largest element is "
            f"{float(scale):.3e} (ratio {ratio:.1e}, allowed {tolerance:.0e})"
        )


def assert_equal_to_serial(
    problem: Callable[[], Problem],
    plan: Plan,
    nprocs: int,
    *,
    tolerance: Tolerance = FP32,
    timeout: float = 60.0,
) -> None:
    """``check_plan`` on ``nprocs`` fresh ranks of this machine.

    ``problem`` is a function of a module, or a partial of one: each rank builds its own.  The plan starts the
    process group from the usual environment variables (``colossalai.launch_from_torch`` does).
    """
    spawn(_check_on_rank, nprocs, timeout=timeout, problem=problem, plan=plan, tolerance=tolerance)


def _check_on_rank(
    rank: int, world_size: int, port: int, problem: Callable[[], Problem], plan: Plan, tolerance: Tolerance
) -> None:
    check_plan(problem(), plan, tolerance=tolerance)
