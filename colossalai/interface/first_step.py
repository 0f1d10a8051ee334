"""The first training step of a boosted model: ranks that share one model are compared once, see
``colossalai.mesh.agreement``.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from colossalai.core import global_context as gpc
from colossalai.interface.optimizer import OptimizerWrapper
from colossalai.mesh import PIPELINE_AXIS, Mesh
from colossalai.mesh.agreement import FirstStep, SameSteps
from colossalai.mesh.gradient_norm import tensor_axes
from colossalai.mesh.rows import sequence_axes
from colossalai.nn.policies.wrap_forward import WholeOutputs

# The modes whose layers leave complete gradients after the backward pass; one of the user's own may complete
# them later.
_OURS = ("1d", "2d", "2.5d", "3d")
# The handlers that leave what tensor-parallel ranks have as it is.
_DATA_HANDLERS = (
    "DataParallelGradientHandler",
    "MoeGradientHandler",
    "SequenceParallelGradientHandler",
    "ZeROGradientHandler",
    "PipelineSharedModuleGradientHandler",
)
LINE = "tp"  # the axis of 1D


def shared_axes(model: nn.Module, mesh: Mesh) -> tuple[str, ...]:
    """The axes along which the ranks that share ``model`` must be given the same batch.

    In 2D, 2.5D, 3D and the tensor mode 'sequence' a model that was not made by ``parallelize`` may begin with
    a layer that is given pieces of the batch, cut by the user.
    """
    whole = any(isinstance(m, WholeOutputs) for m in model.modules())
    tensor = tensor_axes(mesh) if whole else (LINE,)
    cut = sequence_axes(mesh) if whole or gpc.plan.sequence > 1 else ()
    return tuple(axis for axis in (PIPELINE_AXIS, *cut, *tensor) if mesh.size.get(axis, 1) > 1)


def watch_first_step(model: nn.Module, mesh: Mesh | None) -> None:
    """Compare batches and gradients of ``model`` in its first training step, unless it does so by itself."""
    if (
        mesh is None
        or (gpc.plan.mode not in _OURS and gpc.plan.sequence == 1)
        or any(isinstance(m, WholeOutputs) for m in model.modules())
    ):
        return
    piped = mesh.size.get(PIPELINE_AXIS, 1) > 1
    step = FirstStep(
        mesh, () if piped else shared_axes(model, mesh), compare_gradients=not _completes_later()
    )
    if not step.done:
        hooks = _Hooks(step)
        hooks.handles = [
            model.register_forward_pre_hook(hooks.before, with_kwargs=True),
            model.register_forward_hook(hooks.after),
        ]


def watch_steps(model: nn.Module, optimizer: Optimizer, mesh: Mesh | None) -> None:
    """Compare gradients of ``model`` before steps of ``optimizer``, where they are in its parameters."""
    if mesh is None or gpc.plan.mode not in _OURS or all(mesh.size[axis] == 1 for axis in tensor_axes(mesh)):
        return
    raw = optimizer.unwrap() if isinstance(optimizer, OptimizerWrapper) else optimizer
    held = {id(p) for group in raw.param_groups for p in group["params"]}
    named = [(name, p) for name, p in model.named_parameters() if id(p) in held]
    raw.register_step_pre_hook(SameSteps(named, mesh))


def _completes_later() -> bool:
    """Whether the config names a gradient handler of the user's own, which may complete gradients before the
    step.
    """
    handlers = gpc.config.get("gradient_handler") or gpc.config.get("gradient_handlers") or ()
    return any(handler.get("type") not in _DATA_HANDLERS for handler in handlers)


class _Hooks:
    """Hooks of a model that remove themselves."""

    def __init__(self, step: FirstStep) -> None:
        self.step = step
        self.handles: list[Any] = []

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.step.done:
            for handle in self.handles:
                handle.remove()
            return
        self.step.before(model, {**kwargs, **{f"argument {i}": value for i, value in enumerate(args)}})

    def after(self, model: nn.Module, _: Any, outputs: Any) -> None:
        self.step.after(model, outputs)
