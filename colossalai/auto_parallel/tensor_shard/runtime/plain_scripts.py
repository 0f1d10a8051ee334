"""What scripts without a booster do with a model whose parameters are pieces: right, or refused.

A loop in plain PyTorch trains such a model, but what looks at all elements of a parameter, or of all
parameters, sees pieces: norms for clipping, some optimizers, ``state_dict``, torch's DDP.
"""

from __future__ import annotations

import warnings
from functools import cache, wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from colossalai.auto_parallel.tensor_shard.runtime.leaf_calls import (
    check_gradients_asked,
    leaf_that_runs,
)
from colossalai.fx.leaves import ROOT
from colossalai.interface.clipping import watch_clipping
from colossalai.mesh.collectives import all_reduce
from colossalai.mesh.parameter import has_own_mesh, own_mesh, placement
from colossalai.zero.pieces import is_elementwise, or_say_so


def watch_plain_scripts(model: nn.Module) -> None:
    """Let torch's own functions be right for ``model``, or refuse it."""
    watch_clipping()
    _watch_optimizers()
    _watch_scalers()
    _watch_backward()
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


@cache
def _watch_scalers() -> None:
    """Let torch's ``GradScaler`` skip a step on all ranks if a gradient of any overflowed."""
    scalers: Any = torch.amp.GradScaler
    native = scalers._unscale_grads_  # torch's seam for scalers of gradients in pieces

    @wraps(native)
    def unscale(scaler: torch.amp.GradScaler, optimizer: Optimizer, *args: Any) -> dict[torch.device, Tensor]:
        found = native(scaler, optimizer, *args)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if (mesh := next((own_mesh(p) for p in params if has_own_mesh(p)), None)) is None:
            return found
        for device, overflowed in found.items():
            for axis in mesh.size:
                overflowed = all_reduce(overflowed, mesh, axis)
            found[device] = overflowed.clamp(max=1.0)
        return found

    scalers._unscale_grads_ = unscale


@cache
def _watch_backward() -> None:
    """Refuse to differentiate with respect to chosen parameters of a planned model: some of their gradients
    wait in buckets, past autograd, and others are pieces.
    """
    autograd: Any = torch.autograd
    native = autograd._engine_run_backward  # what grad and backward call

    @wraps(native)
    def run(outputs: Any, *args: Any, **options: Any) -> Any:
        inputs = args[3] if len(args) > 3 else options.get("inputs", ())
        check_gradients_asked(outputs, inputs)
        leaf = leaf_that_runs()  # where it is the whole model, every rank has all gradients
        if leaf != ROOT and any(isinstance(x, Tensor) and has_own_mesh(x) for x in inputs):
            where = "" if leaf is None else f"module {leaf!r} asks for gradients of parameters: "
            raise RuntimeError(
                f"{where}torch.autograd.grad, and backward(inputs=...), cannot be asked for gradients of"
                " chosen parameters of a model that autoparallelize has changed: they are summed over ranks"
                " at the end of a whole backward pass; call loss.backward() and read p.grad"
            )
        return native(outputs, *args, **options)

    autograd._engine_run_backward = run


def warn_of_pieces(model: nn.Module) -> None:
    """Warn of a ``state_dict`` of pieces."""
    warnings.warn(
        f"the state_dict of this {type(model).__name__} has the pieces of this rank; a file of the whole"
        " model is written by colossalai.booster.Booster().save_model(model, path), or save_pretrained, which"
        " every rank calls",
        stacklevel=3,
    )
