"""Which optimizers can step the part of a model that a rank holds."""

from __future__ import annotations

from torch.optim import Optimizer

from colossalai.booster.plugin import Plugin, TorchFSDPPlugin
from colossalai.interface import OptimizerWrapper
from colossalai.mesh import placement
from colossalai.zero.pieces import is_elementwise, or_say_so

# Of torch's own.
OF_WHOLE_MODELS = ("LBFGS",)  # takes products of all gradients
OF_PLAIN_TENSORS = ("Rprop",)


def reach_problem(optimizer: Optimizer, kind: type[Plugin] | None, shares_model: bool) -> str | None:
    """Why ``optimizer`` looks at more of the model than this rank holds, and would step each part in another direction; None if not.

    Args:
        kind: the class of the plugin.
        shares_model: whether several ranks hold one model together, by tensor or pipeline parallelism.
    """
    raw = optimizer.unwrap() if isinstance(optimizer, OptimizerWrapper) else optimizer
    name = next((c.__name__ for c in type(raw).__mro__ if c.__module__.startswith("torch.optim")), "")
    problem = None
    if name in OF_WHOLE_MODELS and (shares_model or (kind is not None and issubclass(kind, TorchFSDPPlugin))):
        problem = "looks at the gradients of the whole model at once, of which each rank holds a part"
    elif name in OF_PLAIN_TENSORS and kind is not None and issubclass(kind, TorchFSDPPlugin):
        problem = (
            "writes to elements that it chooses, which torch cannot do with the DTensors of TorchFSDPPlugin"
        )
    elif not is_elementwise(raw):  # Adafactor, Muon, LAMB, or what a script has written itself
        cut = [p for group in raw.param_groups for p in group["params"] if placement(p).sharded]
        if cut:
            problem = f"may look at whole matrices, but tensor parallelism has cut some (here is a piece of shape {tuple(cut[0].shape)})"
    if problem is None:
        return None
    return f"{type(raw).__name__} {problem}; use an optimizer that works element by element, such as AdamW{or_say_so(raw)}"
