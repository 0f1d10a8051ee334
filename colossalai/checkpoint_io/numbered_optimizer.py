"""The states of an optimizer where there is no model to name its parameters: by their numbers, as torch has them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from colossalai.checkpoint_io.optimizer_state import MASTER, OptimizerState, holdings_of
from colossalai.checkpoint_io.sharding import SPREAD
from colossalai.interface import OptimizerWrapper
from colossalai.interface.holding import MASTERS_KEY
from colossalai.mesh import PIPELINE_AXIS
from colossalai.utils.parallel import launched_mesh


class Numbers:
    """The names of parameters where there is no model to ask: their numbers in the groups, as torch has them."""

    section = "model"

    def __init__(self, optimizer: Optimizer) -> None:
        self.mesh = launched_mesh()
        self._numbers = {id(holding.param): str(i) for i, holding in enumerate(holdings_of(optimizer))}
        if self.mesh is not None and self.mesh.size.get(PIPELINE_AXIS, 1) > 1:
            raise ValueError(
                "an optimizer file numbers the parameters of the whole model, but each stage of a pipeline counts its own;"
                " save the run with booster.save, which stores them by their names"
            )

    stage = None

    def name(self, param: Tensor) -> str | None:
        return self._numbers.get(id(param))


class NumberedState(OptimizerState):
    """The state of the serial optimizer in torch's form: states and groups by the numbers of parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer, Numbers(optimizer))
        self._masters = {name for name, holding in self.holdings if holding.is_master}

    def plain(self) -> dict[int, dict[str, Any]]:
        return {int(number): states for number, states in self.plain_states().items()}

    def key(self, name: str) -> str:
        """The name of a state in its parameter's dict."""
        _, number, state = name.split("/")
        return MASTERS_KEY if state == MASTER and number in self._masters else state

    def rest(self, spread: bool = False) -> dict[str, Any]:
        """All but the states; with ``spread``, masters lie among them, and it is noted that they do."""
        groups = [{**options, "params": [int(n) for n in names]} for options, names in self.groups()]
        other = self.optimizer.other_state() if isinstance(self.optimizer, OptimizerWrapper) else {}
        noted = {SPREAD: [MASTERS_KEY]} if spread and self._masters else {}
        return {"param_groups": groups, **other, **noted}

    def state_dict(self, states: dict[int, dict[str, Any]]) -> dict[str, Any]:
        """What ``state_dict`` of the serial optimizer would be."""
        masters = {n: own.pop(MASTERS_KEY) for n, own in states.items() if MASTERS_KEY in own}
        found = {"state": {n: own for n, own in states.items() if own}, **self.rest()}
        return {**found, MASTERS_KEY: masters} if masters else found
