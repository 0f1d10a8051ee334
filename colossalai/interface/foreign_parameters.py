"""Parameters that an optimizer holds and its model does not.

Most are a mistake: the optimizer was built before something gave the model other parameters, and trains
parameters that no forward pass uses.  Some are meant, as those of a criterion that learns too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

NAMED = 3  # so many parameters are named


@dataclass(frozen=True)
class Strangers:
    """The parameters that only one of ``optimizer`` and ``model`` has."""

    optimizer: Optimizer
    model: nn.Module
    held: Sequence[Tensor]
    """Parameters of the optimizer that are not in the model."""
    of_criterion: Sequence[Tensor]
    """Those of them that are in the criterion."""
    left_out: Sequence[str]
    """Parameters of the model that could be trained and are not in the optimizer."""
    has_any: bool
    """Whether the optimizer holds a parameter of the model, or there is none to train."""

    @property
    def who(self) -> str:
        return f"the optimizer ({type(self.optimizer).__name__})"

    def problem(self) -> str | None:
        """Why ``optimizer`` was not built for ``model`` as it is now; None if it may have been."""
        what = f"the model ({type(self.model).__name__})"
        replaced = (
            "something gave the model other parameters after the optimizer was built"
            " (colossalai.nn.parallelize, split_model, tie_weights, a new layer, load_state_dict with"
            " assign=True); build the optimizer afterwards, from model.parameters()"
        )
        if not self.has_any:
            return f"{self.who} holds no parameter of {what}: it belongs to another model, or {replaced}"
        if len(self.held) > len(self.of_criterion) and self.left_out:
            own = {id(p) for p in self.of_criterion}
            first = next(p for p in self.held if id(p) not in own)
            names = ", ".join(self.left_out[:NAMED]) + ", ..." * (len(self.left_out) > NAMED)
            return (
                f"{self.who} holds {len(self.held) - len(own)} parameters that are not in {what}, such as one"
                f" of shape {tuple(first.shape)}, and lacks {len(self.left_out)} of the model ({names}):"
                f" {replaced}. Parameters of a module beside the model, such as a loss, belong inside the"
                " model"
            )
        return None


def strangers(optimizer: Optimizer, model: nn.Module, criterion: Any = None) -> Strangers:
    """Compare what ``optimizer`` holds with the parameters of ``model`` and of ``criterion``, if that is a
    module.
    """
    own = {id(p) for p in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    known = {id(p) for p in held}
    learned = {id(p) for p in criterion.parameters()} if isinstance(criterion, nn.Module) else set()
    others = [p for p in held if id(p) not in own]
    left_out = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in known]
    # a pipeline stage may have nothing to train, and then an optimizer of nothing
    has_any = len(others) < len(held) or not (held or left_out)
    return Strangers(optimizer, model, others, [p for p in others if id(p) in learned], left_out, has_any)
