"""What scripts see of the gradients of a model in chunks, see the note in ``colossalai.zero.elsewhere``."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

from colossalai.mesh import own_grad
from colossalai.zero.elsewhere import KeptGradients, away_class, why_no_gradient

if TYPE_CHECKING:
    from colossalai.zero.gemini.ddp import ZeroDDP


class ShownGradients:
    """The gradients of ``model``, which lie in chunks, whatever the script does with ``p.grad``."""

    def __init__(self, model: ZeroDDP) -> None:
        self._model, self._chunks = weakref.ref(model), model.chunk_manager
        self._of = model.gradients.of
        self._name = type(model).__name__
        slots = [slot for chunk in self._chunks.chunks for slot in chunk.slots]
        self.kept = KeptGradients(self, [slot.param for slot in slots if slot.trained])
        away: dict[type, type] = {}
        for slot in slots:
            if slot.trained:
                slot.native = self.kept.class_of(slot.native)
            if slot.native not in away:
                away[slot.native] = away_class(slot.native)
            slot.away = away[slot.native]
        for chunk in self._chunks.chunks:
            chunk.guard()

    def keeps_gradient(self, param: Tensor) -> bool:
        found = cast(nn.Parameter, param)
        state, slot = self._of[self._chunks.get_chunk(found).index], self._chunks.get_slot(found)
        model = self._model()
        used_up = model is not None and model.optimizer is not None and model.optimizer.used_up(found)
        return (
            used_up
            or slot in state.arrived
            or slot in state.used
            or slot in state.direct
            or own_grad(param) is not None
        )

    def shown_gradient(self, param: Tensor) -> Tensor | None:
        return None

    def why_no_gradient(self, param: Tensor) -> str:
        return why_no_gradient(repr(self._chunks.get_slot(cast(nn.Parameter, param)).name), self._name)

    def zero_grad(self) -> None:
        if (model := self._model()) is not None:
            model.zero_grad()
