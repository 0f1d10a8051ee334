"""``torch.nn.utils.clip_grad_norm_`` and its relatives are right under every plan: the optimizer of the
parameters clips.

Torch's functions look at ``p.grad``.  Under ZeRO and Gemini the gradients are elsewhere, in fp16 they are
scaled, and of a model that is cut over ranks this one sees a part of the norm, so that ranks would clip by
different factors.  There they do what the optimizer's own ``clip_grad_by_norm`` and ``clip_grad_by_value``
do.  A script may have imported them before this package, so their insides are replaced and not their names;
parameters that no such optimizer trains are left to torch.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.utils import clip_grad

from colossalai.interface._compat import replace_inside
from colossalai.mesh import clip_grads, placement
from colossalai.mesh.parameter import has_own_mesh

if TYPE_CHECKING:
    from colossalai.interface.optimizer import OptimizerWrapper

_optimizers: weakref.WeakSet[OptimizerWrapper] = weakref.WeakSet()


def register(optimizer: OptimizerWrapper) -> None:
    """Let torch's functions ask ``optimizer`` when they are given its parameters."""
    _install()
    _optimizers.add(optimizer)


def watch_clipping() -> None:
    """Let torch's functions be right also for parameters on a mesh of their model's own, whoever trains
    them.
    """
    _install()


@functools.cache
def _install() -> None:
    replace_inside(clip_grad.clip_grad_norm_, _clip_norm)
    replace_inside(clip_grad.clip_grad_value_, _clip_value)
    replace_inside(clip_grad._clip_grads_with_norm_, _clip_with_norm)


def _clip_norm(
    native: Callable[..., Tensor],
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    parameters = _listed(parameters)
    optimizer = _responsible(parameters, "clip_grad_norm_", elementwise=False)
    if optimizer is None and any(map(_is_piece, parameters)):
        return clip_grads(parameters, max_norm, None, norm_type, error_if_nonfinite=error_if_nonfinite)
    if optimizer is None:
        return native(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    return optimizer.clip_grad_by_norm(max_norm, norm_type, error_if_nonfinite)


def _clip_value(
    native: Callable[..., None],
    parameters: Tensor | Iterable[Tensor],
    clip_value: float,
    foreach: bool | None = None,
) -> None:
    parameters = _listed(parameters)
    optimizer = _responsible(parameters, "clip_grad_value_", elementwise=True)
    if optimizer is None:
        native(parameters, clip_value, foreach)
    else:
        optimizer.clip_grad_by_value(clip_value)


def _clip_with_norm(
    native: Callable[..., None],
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None = None,
) -> None:
    parameters = _listed(parameters)
    optimizer = _responsible(parameters, "clip_grads_with_norm_", elementwise=False)
    if optimizer is not None:
        raise RuntimeError(
            "clip_grads_with_norm_ is given a norm of what p.grad shows, which under"
            f" {type(optimizer).__name__} is not all of the gradients; use"
            " torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm) or"
            " optimizer.clip_grad_by_norm(max_norm)"
        )
    if any(map(_is_piece, parameters)):
        raise RuntimeError(
            "clip_grads_with_norm_ is given a norm of what p.grad shows, which are pieces of gradients here;"
            " use torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)"
        )
    native(parameters, max_norm, total_norm, foreach)


def _is_piece(param: Tensor) -> bool:
    """Whether the plan of a mesh of its model's own has cut ``param``."""
    return has_own_mesh(param) and bool(placement(param).sharded)


def _listed(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _responsible(params: list[Tensor], who: str, *, elementwise: bool) -> OptimizerWrapper | None:
    """The optimizer that must clip the gradients of ``params``; None if torch may."""
    given = {id(p) for p in params}
    found = {}
    for optimizer in list(_optimizers):
        trained, stepped = optimizer.trained_parameters(), optimizer.parameters()
        own = {id(p) for p in (*trained, *stepped)}
        if own & given and not optimizer.torch_may_clip(elementwise=elementwise):
            found[optimizer] = [{id(p) for p in trained}, {id(p) for p in stepped}]
    inner = {id(optimizer.optim) for optimizer in found}
    outer = [optimizer for optimizer in found if id(optimizer) not in inner]
    if not outer:
        return None
    if (
        len(outer) == 1
        and any(own <= given for own in found[outer[0]])
        and not _others(params, found[outer[0]])
    ):
        return outer[0]
    raise RuntimeError(
        f"torch.nn.utils.{who} was given {len(params)} parameters, which are not just those that"
        f" {type(outer[0]).__name__} trains; under this plan all gradients of an optimizer are clipped"
        " together: pass model.parameters(), or call optimizer.clip_grad_by_norm or clip_grad_by_value"
    )


def _others(params: list[Tensor], own: list[set[int]]) -> bool:
    """Whether some of ``params`` have gradients that the optimizer knows nothing of."""
    known = set[int]().union(*own)
    return any(p.grad is not None for p in params if id(p) not in known)
