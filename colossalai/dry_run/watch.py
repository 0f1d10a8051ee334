"""Counts the tensors that a rank holds at the worst moments of a training step, by kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from colossalai.engine.engine import Engine
from colossalai.interface import OptimizerWrapper
from colossalai.mesh import own_grad
from colossalai.pipeline.executor import Executor
from colossalai.pipeline.schedule.base import Action, PassKind
from colossalai.utils.meta import MetaBytes

Moment = Literal["forward", "backward", "step"]


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes on the device at the worst moment of a training step; their sum is ``peak``.

    ``activations`` are what forward passes that are done keep for their backward passes, the logits for the
    loss included; ``workspace`` is everything else that was alive at that moment.
    """

    weights: int = 0
    masters: int = 0
    states: int = 0
    gradients: int = 0
    buckets: int = 0
    """Copies of the gradients in which data-parallel ranks exchange them."""
    activations: int = 0
    workspace: int = 0
    moment: Moment
    """What the rank does when it needs most."""
    host: int = 0
    """Bytes in the memory of the host, beside the sum."""

    @property
    def parts(self) -> dict[str, int]:
        """The summands of ``peak`` by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("moment", "host")}

    @property
    def peak(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class _Peak:
    """A peak."""

    moment: Moment
    total: int
    gradients: int
    stored: int


class Watch:
    """Follows one engine through its steps; ``MetaBytes`` calls ``at_peak``."""

    memory: MetaBytes

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._masters: list[Tensor] = []
        self._moment: Moment = "forward"
        self._running = False
        self._row: Sequence[Action] = ()
        self._done = 0
        self.first_stored = 0

    def start(self, optimizer: OptimizerWrapper, row: Sequence[Action]) -> None:
        """The step that counts begins; ``row`` is what the rank does in it, if it is a stage of a
        pipeline.
        """
        own = {id(p) for p in self._model.parameters()}
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        self._masters = [p for p in trained if id(p) not in own]
        self._weights = nbytes((*self._model.parameters(), *self._model.buffers()))
        self._of_masters = nbytes(self._masters)
        self._states = nbytes(t for t in tree_leaves(dict(optimizer.state)) if isinstance(t, Tensor))
        self._row, self._stored, self._running = row, 0, True
        self._seen: dict[bool, _Peak] = {}
        self._begin("forward")

    def _begin(self, moment: Moment) -> None:
        self._moment = moment
        if self._running:
            self.memory.restart()
            self.at_peak()

    def before_backward(self) -> None:
        """The last stage, or a model that is not cut, begins its backward pass."""
        if self._running:
            self._stored = self._stored_now()
            self.first_stored = self.first_stored or self._stored
        self._begin("backward")

    def before_step(self) -> None:
        self._stored = 0
        self._begin("step")

    def after_action(self) -> None:
        """A pass of a pipeline stage has ended; what is left of it is stored."""
        self._done += 1
        if self._running:
            self._stored = self._stored_now()
            self.first_stored = self.first_stored or self._stored
            following = self._row[self._done].kind if self._done < len(self._row) else PassKind.BACKWARD
            self._begin("forward" if following is PassKind.FORWARD else "backward")

    def at_peak(self) -> None:
        if self._running:
            is_step = self._moment == "step"
            seen = _Peak(self._moment, self.memory.peak, self._gradients(), self._stored)
            if is_step not in self._seen or seen.total > self._seen[is_step].total:
                self._seen[is_step] = seen

    def estimate(self, more_stored: int = 0, with_step: bool = True) -> MemoryEstimate:
        """The worse of the passes, with ``more_stored`` bytes of activations, and the optimizer's step."""
        seen = self._seen.values() if with_step else [self._seen[False]]
        return max((self._as_estimate(one, more_stored) for one in seen), key=lambda e: e.peak)

    def _as_estimate(self, seen: _Peak, more_stored: int) -> MemoryEstimate:
        rest = seen.total - self._fixed - seen.gradients
        # a backward pass gives activations back while it makes gradients
        stored = max(min(seen.stored, rest), 0)
        return MemoryEstimate(
            weights=self._weights,
            masters=self._of_masters,
            states=self._states,
            gradients=seen.gradients,
            activations=stored + (0 if seen.moment == "step" else more_stored),
            workspace=rest - stored,
            moment=seen.moment,
        )

    @property
    def _fixed(self) -> int:
        return self._weights + self._of_masters + self._states

    def _stored_now(self) -> int:
        return max(self.memory.now - self._fixed - self._gradients(), 0)

    def _gradients(self) -> int:
        return nbytes(
            grad for p in (*self._model.parameters(), *self._masters) if (grad := own_grad(p)) is not None
        )


class WatchedEngine(Engine):
    """An engine that tells when its backward pass begins."""

    watch: Watch

    def backward(self, loss: Tensor) -> None:
        self.watch.before_backward()
        super().backward(loss)


class WatchedExecutor(Executor):
    """An executor that tells after each action."""

    watch: Watch

    def _do(self, action: Action, *args: Any) -> None:
        super()._do(action, *args)
        self.watch.after_action()


def nbytes(tensors: Iterable[Any]) -> int:
    """The bytes of the memory of ``tensors``; what shares memory counts once, what has some is not
    counted.
    """
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t.is_meta}
    return sum(storages.values())
