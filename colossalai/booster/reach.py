"""Which optimizers can step the part of a model that a rank holds."""

from __future__ import annotations

from torch.optim import Optimizer

from colossalai.booster.plugin import Plugin, TorchFSDPPlugin
from colossalai.interface import OptimizerWrapper
from colossalai.mesh import placement

# Of torch's own; by their names, since older versions do not have all of them.
OF_WHOLE_MODELS = ("LBFGS",)  # takes products of all gradients
OF_WHOLE_MATRICES = ("Adafactor", "Muon")  # take means of rows and columns, or orthogonalize


def check_reach(optimizer: Optimizer, plugin: Plugin | None, shares_model: bool) -> None:
    """Refuse an optimizer that looks at more of the model than this rank holds, and would step each part in another direction.

    Args:
        shares_model: whether several ranks hold one model together, by tensor or pipeline parallelism.
    """
    raw = optimizer.unwrap() if isinstance(optimizer, OptimizerWrapper) else optimizer
    name = next(
        (kind.__name__ for kind in type(raw).__mro__ if kind.__module__.startswith("torch.optim")), ""
    )
    problem = None
    if name in OF_WHOLE_MODELS and (shares_model or isinstance(plugin, TorchFSDPPlugin)):
        problem = "looks at the gradients of the whole model at once, of which each rank holds a part"
    elif name in OF_WHOLE_MATRICES:
        cut = [p for group in raw.param_groups for p in group["params"] if placement(p).sharded]
        if cut:
            problem = f"looks at whole matrices, but tensor parallelism has cut some (here is a piece of shape {tuple(cut[0].shape)})"
    if problem is not None:
        raise ValueError(
            f"{type(raw).__name__} {problem}; use an optimizer that works element by element, such as AdamW"
        )
