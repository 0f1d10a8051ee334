"""What scripts without a booster do with a model whose parameters are pieces: right, or refused.

A loop in plain PyTorch trains such a model, but what looks at all elements of a parameter, or of all
parameters, sees pieces: norms for clipping, some optimizers, ``state_dict``, torch's DDP.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from colossalai.interface.clipping import watch_clipping
from colossalai.mesh.parameter import has_own_mesh, placement
from colossalai.zero.pieces import is_elementwise, or_say_so


def watch_plain_scripts(model: nn.Module) -> None:
    """Let torch's own functions be right for ``model``, or refuse it."""
    watch_clipping()
    _watch_optimizers()
    # it would give all ranks the pieces of the first; without a parameter to average, it refuses the model
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


_fine: WeakSet[Optimizer] = WeakSet()


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, *_: Any) -> None:
    """Before a step: refuse what chooses a direction by whole parameters, of which it would see pieces."""
    if optimizer in _fine:
        return
    params = (p for group in optimizer.param_groups for p in group["params"])
    cut = next((p for p in params if has_own_mesh(p) and placement(p).sharded), None)
    if cut is not None and not is_elementwise(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} may look at whole parameters, but the plan of autoparallelize has"
            f" cut some (a piece here: {tuple(cut.shape)}), and would step each piece by itself; use an"
            f" optimizer that works element by element, such as AdamW{or_say_so(optimizer)}"
        )
    _fine.add(optimizer)


def warn_of_pieces(model: nn.Module) -> None:
    """Warn of a ``state_dict`` of pieces."""
    warnings.warn(
        f"the state_dict of this {type(model).__name__} has the pieces of this rank; a file of the whole"
        " model is written by colossalai.booster.Booster().save_model(model, path), or save_pretrained, which"
        " every rank calls",
        stacklevel=3,
    )
