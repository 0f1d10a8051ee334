"""fp32 masters of half-precision weights.

A small update of a large fp16 weight is rounded away.  So the optimizer holds a copy of each such weight in
fp32, its master, in the place that the weight had in its parameter group; the optimizer steps the master, and
the weight is the master rounded.  Groups, their options and learning-rate schedulers do not notice.

Scripts may write to the weights too: see [Note: which weights count] in
``colossalai.nn.optimizer.refresh_masters``. The digits that a model had before it was rounded are kept only
if no script writes to it before the first step: replicas that began with different weights and got those of
rank 0 must not differ in digits that only rank 0 has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from colossalai._numeric import HALF_DTYPES
from colossalai.amp._compat import changes, copy_all
from colossalai.nn.optimizer.refresh_masters import UncountedWrites
from colossalai.utils import copy_tensor_parallel_attributes


@dataclass
class _Pair:
    weight: Tensor
    master: Tensor
    seen: int  # changes of the weight when it last was the rounded master
    begun: bool = False  # stepped or loaded; until then other replicas may have other digits


class MasterWeights:
    """The masters of the half-precision weights of ``optim``.

    Frozen weights need none and get none; a weight that is set free later gets its own at the next step.

    Args:
        values: fp32 values, by weight, of weights that were just rounded.
    """

    def __init__(self, optim: Optimizer, values: Mapping[Tensor, Tensor] | None = None) -> None:
        self.optim = optim
        self._pairs: list[_Pair] = []
        self._uncounted = UncountedWrites()
        self.adopt(values or {})

    def adopt(self, values: Mapping[Tensor, Tensor]) -> None:
        """Put a master in the place of every trainable half-precision weight in the optimizer's groups."""
        for group in self.optim.param_groups:
            params = group["params"]
            for i, weight in enumerate(params):
                if weight.dtype in HALF_DTYPES and weight.requires_grad:
                    params[i] = self._master_of(weight, values.get(weight, weight))

    def _master_of(self, weight: Tensor, value: Tensor) -> Tensor:
        master = torch.nn.Parameter(value.detach().to(weight.device, torch.float32))
        copy_tensor_parallel_attributes(weight, master)
        if weight in self.optim.state:
            self.optim.state[master] = self.optim.state.pop(weight)
        self._pairs.append(_Pair(weight, master, changes(weight)))
        return master

    def weights(self) -> list[Tensor]:
        return [pair.weight for pair in self._pairs]

    def masters(self) -> list[Tensor]:
        return [pair.master for pair in self._pairs]

    def weights_by_master(self) -> dict[Tensor, Tensor]:
        return {pair.master: pair.weight for pair in self._pairs}

    def take_gradients(self) -> None:
        """Move the gradients of the weights, as fp32, to their masters."""
        for pair in self._pairs:
            grad, pair.weight.grad = pair.weight.grad, None
            pair.master.grad = None if grad is None else grad.to(torch.float32)

    @torch.no_grad()
    def refresh(self, *, is_step: bool = False) -> None:
        """Bring to the masters what others wrote to the weights [Note: which weights count]."""
        compares = self._uncounted.is_due() if is_step else True
        for pair in self._pairs:
            now = changes(pair.weight)
            has_changed, pair.seen = now != pair.seen, now
            if has_changed and not pair.begun:
                pair.master.copy_(pair.weight)
            else:
                self._uncounted.refresh_(pair.master, pair.weight, has_changed=has_changed, compares=compares)

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters to the weights."""
        if self._pairs:
            copy_all(self.weights(), self.masters())
        for pair in self._pairs:
            pair.seen, pair.begun = changes(pair.weight), True

    def state_dict(self) -> dict[int, Tensor]:
        """The masters by the index that their parameter has in the optimizer's state."""
        self.refresh()
        owned = {id(master) for master in self.masters()}
        return {i: p.detach() for i, p in self._numbered() if id(p) in owned}

    def check_state(self, state: Mapping[Any, Tensor]) -> None:
        """Refuse masters of other parameters."""
        numbered = dict(self._numbered())
        for index, value in state.items():
            own = numbered.get(int(index))
            if own is None or own.shape != value.shape:
                shape = "no parameter" if own is None else f"one of shape {tuple(own.shape)}"
                raise ValueError(
                    f"the saved master weight {index} has shape {tuple(value.shape)}, but the optimizer has"
                    f" {shape} there"
                )

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[Any, Tensor]) -> None:
        """Take the masters of a checkpoint, as far as the weights of the model are these masters rounded."""
        self.check_state(state)
        numbered = dict(self._numbered())
        owned = {id(master) for master in self.masters()}
        for index, value in state.items():
            own = numbered[int(index)]
            if id(own) in owned:  # a weight that needs no master here is the model's affair
                own.copy_(value)
        self.weights_loaded()

    def weights_loaded(self) -> None:
        """Masters or weights were loaded: compare them, before the next step."""
        for pair in self._pairs:
            pair.seen, pair.begun = -1, True

    def _numbered(self) -> list[tuple[int, Tensor]]:
        return list(enumerate(p for group in self.optim.param_groups for p in group["params"]))
