"""``ScaledOptimizer`` scales losses, and may skip a step; its ``step`` is the step of every plan.

Small gradients vanish in fp16, so the loss is multiplied by a scale before the backward pass, and the
gradients are divided by it before they are used.  A gradient that overflows shows as inf or nan: then the
step is skipped and the scale reduced.

``ScaledOptimizer.step`` says in which order things happen, for fp16 by torch, fp16 with masters, ZeRO and
Gemini.  These plans supply the parts: ``stepping``, ``collect``, ``unscale``, ``clip``, ``refresh_masters``,
``update``, ``publish``.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from colossalai.amp.report import SkipReport
from colossalai.interface import ColossalaiOptimizer
from colossalai.mesh import Mesh
from colossalai.utils.parallel import launched_mesh

SCALER_KEY = "grad_scaler"


class ScaledOptimizer(ColossalaiOptimizer):
    """An optimizer that unscales gradients once: when they are clipped, or else when it steps.

    Args:
        groups: the ranks that decide together; each of them must call ``step``, also if it has no gradient of
            its own.
        report: warn of skipped steps.
        mesh: the ranks that the parameters may be cut over, by default those of a launched job.
    """

    scaler: Any

    def __init__(
        self,
        optim: Optimizer,
        groups: Sequence[dist.ProcessGroup],
        report: bool = True,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__(optim, mesh or launched_mesh())
        self._skipped = False
        self._groups = list(groups)
        self._report = SkipReport(report)
        self._unscaled = False
        self._overflow: bool | Tensor = False  # what ``unscale`` found
        self._scaled = False  # a loss since the last step or zero_grad

    @property
    def is_scaled(self) -> bool:
        """Whether losses are scaled at all; not by the constant scale 1."""
        return True

    def torch_may_clip(self, *, elementwise: bool) -> bool:
        return False

    @property
    def skips_steps(self) -> bool:
        return True

    @property
    def step_was_skipped(self) -> bool:
        return self._skipped

    @property
    @abstractmethod
    def loss_scale(self) -> float:
        """What the next loss is multiplied by."""

    # The parts of a step, in their order

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Surround a step: checks before it, and what is left to do after it."""
        yield

    def collect(self) -> None:
        """Give every tensor that the optimizer steps its gradient, averaged over the ranks, still scaled."""

    @abstractmethod
    def unscale(self) -> bool | Tensor:
        """Divide the gradients by the scale; returns whether a gradient of any rank has overflowed."""

    def clip(self) -> None:
        """Clip the gradients to the norm that the plan was given."""

    def refresh_masters(self, *, is_step: bool = False) -> None:
        """Bring to the masters what others wrote to the weights [Note: which weights count]."""

    def update(self) -> Any:
        """Let the optimizer inside step."""
        return self.optim.step()

    def publish(self) -> None:
        """Write the updated values to the weights that the model computes with, on every rank."""

    @abstractmethod
    def update_scale(self, overflowed: bool) -> None:
        """Choose the scale of the next iteration."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self._check_not_unscaled()
        self.scale_loss(loss).backward(*args, **kwargs)

    def expect_gradients(self) -> None:
        self._check_not_unscaled()
        self._scaled = True

    def _check_not_unscaled(self) -> None:
        if self._unscaled:
            raise RuntimeError(
                "the gradients were unscaled already (by clipping), and a scaled loss cannot be added to"
                " them; call optimizer.step() or optimizer.zero_grad() before the next backward pass"
            )

    def unscale_grad(self) -> None:
        if not self._unscaled and (self._groups or self._has_grad()):
            self._check_scaled()
            self.collect()
            self._overflow = self.unscale()
            self._unscaled = True

    def _check_scaled(self) -> None:
        if self.is_scaled and not self._scaled and self._has_grad():
            raise RuntimeError(
                f"the gradients come from a loss that was not scaled, but {type(self).__name__} would divide"
                f" them by the loss scale {self.loss_scale:g}; call booster.backward(loss, optimizer) or"
                " optimizer.backward(loss) instead of loss.backward(), once before every step"
            )

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step, unless a gradient is inf or nan; then only the loss scale is reduced."""
        if args or kwargs:
            raise ValueError(
                f"{type(self).__name__}.step takes no closure and no options: call backward(loss), then"
                " step()"
            )
        with self.stepping():
            self.unscale_grad()  # collect and unscale, unless clipping by hand has done so
            if not self._unscaled:  # no gradient, and no other rank to agree with
                self._skipped = False
                return self.optim.step()
            self._skipped, result = bool(self._overflow), None
            if not self._skipped:
                self.clip()
                self.refresh_masters(is_step=True)
                result = self.update()
                self.publish()
            # a skipped step is no reason for torch to warn that the scheduler ran before the optimizer
            self.optim._opt_called = True  # type: ignore[attr-defined]
            self._end_iteration(self._skipped)
        return result

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        super().zero_grad(*args, **kwargs)
        self._scaled = False
        if self._unscaled:  # the gradients were clipped and then thrown away
            self._end_iteration(bool(self._overflow))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), SCALER_KEY: self.scaler.state_dict()}

    def other_state(self) -> dict[str, Any]:
        scale = {SCALER_KEY: self.scaler.state_dict()} if self.is_scaled else {}
        return {**super().other_state(), **scale}

    def load_other_state(self, state: dict[str, Any]) -> None:
        super().load_other_state(state)
        saved, own = state.get(SCALER_KEY), self.scaler.state_dict()
        if (
            self.is_scaled and saved and saved.keys() != own.keys()
        ):  # of another precision, which counts otherwise
            saved = {**own, "scale": saved["scale"]}
        if self.is_scaled:
            self._load_scale(saved)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load; a state without loss scale, of another precision or version,
        leaves the present one, with a warning.
        """
        state_dict = dict(state_dict)
        scaler_state = state_dict.pop(SCALER_KEY, None)
        super().load_state_dict(state_dict)
        self._load_scale(scaler_state)

    def _load_scale(self, scaler_state: dict[str, Any] | None) -> None:
        if scaler_state:
            self.scaler.load_state_dict(scaler_state)
        elif scaler_state is None and self.is_scaled:
            warnings.warn(
                f"the state that is loaded into {type(self).__name__} holds no loss scale (it was saved in"
                f" another precision, or by an older version); training goes on with the scale"
                f" {self.loss_scale:g}",
                stacklevel=2,
            )

    def _end_iteration(self, overflowed: bool) -> None:
        scale = self.loss_scale if overflowed else None
        self.update_scale(overflowed)
        if scale is None:
            self._report.good_step()
        else:
            self._report.skipped_step(scale, self.loss_scale)
        self._unscaled = self._scaled = False

    def _has_grad(self) -> bool:
        return any(p.grad is not None for p in self.parameters())
