"""``OptimizerWrapper``: the optimizer that a plugin or a mixed precision hands back to the training script.

It is a ``torch.optim.Optimizer`` to the eye of torch (learning-rate schedulers insist on that), but owns
nothing: groups, states and hooks are those of the optimizer inside.  So a scheduler works whether it was
built on the optimizer before it was boosted or on the wrapper after.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai.interface.clipping import register
from colossalai.interface.holding import Holding
from colossalai.mesh import Mesh, clip_grads
from colossalai.mesh.gradient_norm import is_whole, own_part
from colossalai.utils.optimizer_state import check_state
from colossalai.utils.parallel import launched_mesh


def check_clip_value(clip_value: Any) -> None:
    if not isinstance(clip_value, int | float | Tensor) or not clip_value >= 0:
        raise ValueError(f"clip_grad_by_value needs a clip_value of at least 0, got {clip_value!r}")


def local_gradients() -> RuntimeError:
    """The refusal of a step with gradients that every replica has for itself, and would be a replica no
    more.
    """
    return RuntimeError(
        "optimizer.step() with gradients that were not averaged: every pass since the last step was under"
        " no_sync, and the replicas would drift apart; let the last pass of each group, also of a shorter"
        " last one, run outside of no_sync"
    )


class OptimizerWrapper(Optimizer):
    """Everything of ``optim``, and the backward pass and gradient clipping as the plan at work needs them.

    A plan overrides ``backward``; a mixed precision overrides ``scale_loss``, ``unscale_grad`` and ``step``,
    and says with ``skips_steps`` and ``step_was_skipped`` that its steps may be skipped.  Wrappers may be
    stacked.

    Args:
        mesh: the ranks that the parameters may be cut over; the norm of all gradients is taken over them.
    """

    def __init__(self, optim: Optimizer, mesh: Mesh | None = None) -> None:
        # no super().__init__(): it would create a second set of groups, states and hooks
        if not isinstance(optim, Optimizer):
            raise TypeError(
                f"{type(self).__name__} wraps a torch.optim.Optimizer, got {type(optim).__name__}: {optim!r}"
            )
        self.optim = optim
        self._mesh: Mesh | None = None
        if mesh is not None:
            self.mesh = mesh
        register(self)

    def unwrap(self) -> Optimizer:
        """The user's optimizer, below every wrapper."""
        return self.optim.unwrap() if isinstance(self.optim, OptimizerWrapper) else self.optim

    @property
    def mesh(self) -> Mesh | None:
        """The ranks that the parameters may be cut over; the wrappers of a stack share one."""
        return self.optim.mesh if isinstance(self.optim, OptimizerWrapper) else self._mesh

    @mesh.setter
    def mesh(self, mesh: Mesh | None) -> None:
        if isinstance(self.optim, OptimizerWrapper):
            self.optim.mesh = mesh
        else:
            self._mesh = mesh

    @property
    def skips_steps(self) -> bool:
        """Whether ``step`` may leave the parameters as they are, because a gradient overflowed."""
        return isinstance(self.optim, OptimizerWrapper) and self.optim.skips_steps

    @property
    def averages_gradients(self) -> bool:
        """Whether the optimizer itself averages the gradients of the data-parallel ranks, at the latest in
        ``step``.
        """
        return isinstance(self.optim, OptimizerWrapper) and self.optim.averages_gradients

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last ``step`` was skipped."""
        return isinstance(self.optim, OptimizerWrapper) and self.optim.step_was_skipped

    # What training scripts call

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """The backward pass of ``loss``; the other arguments are those of ``torch.Tensor.backward``.

        Of stacked wrappers the innermost scales the loss; one outside that changes it overrides this method.
        """
        if isinstance(self.optim, OptimizerWrapper):
            self.optim.backward(loss, *args, **kwargs)
        else:
            self.scale_loss(loss).backward(*args, **kwargs)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """``loss`` as it enters the backward pass."""
        return self.optim.scale_loss(loss) if isinstance(self.optim, OptimizerWrapper) else loss

    def expect_gradients(self) -> None:
        """A backward pass begins whose loss another rank has scaled, as in a pipeline."""
        if isinstance(self.optim, OptimizerWrapper):
            self.optim.expect_gradients()

    def unscale_grad(self) -> None:
        """Take the factor of ``scale_loss`` out of the gradients, if it is still in them."""
        if isinstance(self.optim, OptimizerWrapper):
            self.optim.unscale_grad()

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clip every element of every gradient to ``[-clip_value, clip_value]``."""
        if isinstance(self.optim, OptimizerWrapper):
            self.optim.clip_grad_by_value(clip_value)
            return
        check_clip_value(clip_value)
        self.unscale_grad()
        with torch.no_grad():
            for p in self.parameters():
                if p.grad is not None:
                    own_part(p.grad).clamp_(-clip_value, clip_value)

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale all gradients so that their norm, taken over the whole model, is at most ``max_norm``.

        Returns the norm before clipping.  Pieces of parameters on other ranks are counted, copies are counted
        once.
        """
        if isinstance(self.optim, OptimizerWrapper):
            return self.optim.clip_grad_by_norm(max_norm, norm_type, error_if_nonfinite)
        self.unscale_grad()
        params, mesh = self.parameters(), self.mesh
        if mesh is None and not is_whole(params, None):
            mesh = launched_mesh()  # of an optimizer that a script has wrapped itself
        return clip_grads(params, max_norm, mesh, norm_type, error_if_nonfinite=error_if_nonfinite)

    def torch_may_clip(self, *, elementwise: bool) -> bool:
        """Whether torch's own functions for clipping (``elementwise``: by value) see in ``p.grad`` what they
        should.

        They do not where gradients are scaled or kept elsewhere, and see a part only where parameters are on
        several ranks.
        """
        if isinstance(self.optim, OptimizerWrapper):
            return self.optim.torch_may_clip(elementwise=elementwise)
        return elementwise or is_whole(self.parameters(), self.mesh)

    def parameters(self) -> list[Tensor]:
        """What the optimizer steps: the parameters of all groups, in order; see ``trained_parameters``."""
        return [p for group in self.param_groups for p in group["params"]]

    def trained_parameters(self) -> list[Tensor]:
        """The parameters of the model that the backward pass gives gradients to, in the order of the groups.

        Between the backward pass and clipping or the step, a plan finds the gradients here.  ``parameters``
        may hold fp32 masters in the place of half-precision weights, which get their gradients only in the
        step.
        """
        if isinstance(self.optim, OptimizerWrapper):
            return self.optim.trained_parameters()
        return [p for p in self.parameters() if p.requires_grad]

    # What a checkpoint asks for.  A plan that overrides these can be saved and loaded under any other.

    def holdings(self) -> list[Holding]:
        """For each tensor in the groups, in order: the parameter of the model, or the part of one, that it
        stands for.
        """
        if isinstance(self.optim, OptimizerWrapper):
            return self.optim.holdings()
        return [Holding(p, p) for p in self.parameters()]

    def other_state(self) -> dict[str, Any]:
        """What must be saved beside the groups and the states of parameters: small values, the same on all
        ranks.
        """
        return self.optim.other_state() if isinstance(self.optim, OptimizerWrapper) else {}

    def load_other_state(self, state: dict[str, Any]) -> None:
        """Load what ``other_state`` gave, maybe under another precision; the states of parameters are loaded
        already.
        """
        if isinstance(self.optim, OptimizerWrapper):
            self.optim.load_other_state(state)

    def weights_loaded(self) -> None:
        """A checkpoint has written to weights of the model, or to states and masters where ``holdings`` said
        they are.

        torch has not counted this as a change of these tensors.  A plan that keeps a weight in two places
        compares them, and the model's counts.
        """
        if isinstance(self.optim, OptimizerWrapper):
            self.optim.weights_loaded()

    # What torch calls.  The base class defines these, so __getattr__ would never be asked for them.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optim.param_groups = value

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        return self.optim.state

    @state.setter
    def state(self, value: defaultdict[Tensor, Any]) -> None:
        self.optim.state = value

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optim.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self.optim.defaults = value

    def step(self, *args: Any, **kwargs: Any) -> Any:
        return self.optim.step(*args, **kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load; the state of another kind of optimizer, or of parameters of other shapes, is refused."""
        if not isinstance(self.optim, OptimizerWrapper):
            check_state(self.optim, state_dict)
        self.optim.load_state_dict(state_dict)

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.optim.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.optim.register_step_post_hook(hook)

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.optim.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.optim.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.optim.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.optim.register_load_state_dict_post_hook(hook, prepend)

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # before __init__ (copy, pickle) there is no optimizer to ask
            raise AttributeError(f"this {type(self).__name__} wraps no optimizer yet")
        return getattr(self.optim, name)

    def __getstate__(self) -> dict[str, Any]:
        # A learning-rate scheduler replaces `step` by a closure of its own, which cannot be pickled; a mesh
        # belongs to the job that made it.
        return {name: value for name, value in self.__dict__.items() if name != "step"} | {"_mesh": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"


class ColossalaiOptimizer(OptimizerWrapper):
    """``optim``, and what engines of the older interface call.

    Any optimizer can be put inside, also one of a plan.
    """

    def backward_by_grad(self, tensor: Tensor, grad: Tensor) -> None:
        """The backward pass of ``tensor``, whose gradient has come from where the loss is, with the loss
        scale in it.
        """
        self.expect_gradients()
        torch.autograd.backward(tensor, grad)

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        """``clip_grad_by_norm`` of what the optimizer trains; it knows its parameters, ``model`` is not
        asked.

        0 clips nothing, as ``clip_grad_norm = 0`` in a config; the norm is returned all the same.
        """
        return self.clip_grad_by_norm(math.inf if max_norm == 0 else max_norm)
