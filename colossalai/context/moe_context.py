"""What the layers of a mixture of experts share: their places in the job, and the losses of their routers."""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from colossalai.context.parallel_context import global_context as gpc
from colossalai.context.parallel_mode import ParallelMode
from colossalai.context.random import moe_set_seed
from colossalai.mesh.mesh import DATA_AXES, Mesh
from colossalai.mesh.rows import expert_axes


@dataclass(frozen=True)
class MoeParallelInfo:
    """How the experts of a layer are shared out: over ``ep_size`` ranks, of which there are ``dp_size`` sets
    that hold the same.
    """

    ep_size: int
    dp_size: int
    ep_group: dist.ProcessGroup | None = field(default=None, compare=False)
    dp_group: dist.ProcessGroup | None = field(default=None, compare=False)


class RouterLosses(NamedTuple):
    """The losses of one or more routers for a micro-batch."""

    balance: Tensor
    z: Tensor

    def plus(self, other: RouterLosses) -> RouterLosses:
        return RouterLosses(self.balance + other.balance, self.z + other.z)


@dataclass
class _Made:
    """The losses of one layer."""

    losses: RouterLosses
    maker: Any
    """A weak reference to the layer."""
    training: bool
    call: int = 0
    """The number of the call of a model in which it was made."""
    way_back: Any = None
    """A weak reference to what lives as long as the graph of the layer's outputs."""

    @property
    def is_left_over(self) -> bool:
        """Whether the outputs are gone, so that no backward pass can come."""
        return self.way_back is not None and self.way_back() is None


@dataclass
class _RouterPass:
    """A forward pass: what its routers made."""

    made: list[_Made] = field(default_factory=list)
    taken: bool = False
    hidden: bool = False
    """Whether a checkpoint hides the graph of some losses."""
    call: int = 0
    _model: Any = None
    _came: list[Any] = field(default_factory=list)

    def is_over(self, maker: Any, *, has_grad: bool) -> bool:
        """Whether a loss of ``maker`` that comes now belongs to another pass."""
        layer, mode = _reference(maker), getattr(maker, "training", True)
        if self.taken or any(each.maker == layer and each.training != mode for each in self.made):
            return True
        others = any(each.maker != layer for each in self.made)
        return not has_grad and others and self.made[0].maker == layer

    def come(self, maker: Any, model: Any) -> None:
        """Note that ``maker`` comes in a call of ``model``, which ends when the model comes back to a layer,
        or another one comes.
        """
        layer = _reference(maker)
        if model is None or model != self._model or layer in self._came:
            self.call, self._model, self._came = self.call + 1, model, []
        self._came.append(layer)
        self.forget_left_over()

    def forget_left_over(self) -> None:
        """Forget calls that were thrown away: nothing is left of the outputs of their layers.

        A layer whose outputs are gone was detached if the call goes on, or if later layers of it are left.
        """
        alive = {self.call}
        # the last first: its losses hold the graph of the layers before, and so would a name for them
        for place in reversed(range(len(self.made))):
            if not self.made[place].is_left_over:
                alive.add(self.made[place].call)
            elif self.made[place].call not in alive:
                del self.made[place]


def _reference(maker: Any) -> Any:
    return None if maker is None else weakref.ref(maker)


def _is_hidden() -> bool:
    """Whether this code is in the first run of a checkpoint with ``use_reentrant=True``, of which autograd
    sees nothing.  Torch tells it by no flag; the function is on the stack.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back
    return frame is not None


def _called_model(maker: Any) -> Any:
    """A weak reference to the outermost module that is at work, if it is not ``maker`` itself."""
    frame: FrameType | None = sys._getframe()
    outermost = None
    while frame is not None:
        if frame.f_code is _CALL:
            outermost = frame
        frame = frame.f_back
    model = None if outermost is None else outermost.f_locals.get("self")
    return None if model is maker else _reference(model)


_CALL = torch.nn.Module._call_impl.__code__


class MoeContext:
    """Holds the losses that routers made in the forward pass, until the loss of the model takes them.

    A forward pass is over, and its losses are forgotten, when they were taken and another pass begins; when
    the backward pass comes by their layers; when nothing is left of their outputs and another pass begins (a
    layer whose outputs are detached counts, as long as the module that the script called goes on); and when a
    layer comes again that was switched between training and evaluation.

    Passes with and without gradients are kept apart: a teacher that is asked without gradients takes nothing
    from its pupil.  Without gradients, a pass is also over when one with gradients begins, and when its first
    layer is called again after others; a model that has one layer in many places calls ``reset_loss`` at the
    start.
    """

    def __init__(self) -> None:
        self.is_initialized = False
        self.use_kernel_optim = True
        self.parallel_info_dict: dict[int, MoeParallelInfo] = {}
        self._passes = {True: _RouterPass(), False: _RouterPass()}  # with gradients, and without

    def setup(self, seed: int, use_kernel_optim: bool = True) -> None:
        """Seed the random stream of experts.  The ranks that share experts are those of the launched
        config.
        """
        if not gpc.is_initialized(ParallelMode.GLOBAL):
            raise RuntimeError("MOE_CONTEXT.setup needs a launched job: call colossalai.launch before")
        moe_set_seed(seed)
        self.is_initialized, self.use_kernel_optim = True, use_kernel_optim

    def set_kernel_not_use(self) -> None:
        """Products of experts are computed by torch's kernels in any case; this is kept for older scripts."""
        self.use_kernel_optim = False

    @property
    def max_ep_size(self) -> int:
        """How many ranks share experts at most: the size of ``parallel.moe``."""
        mesh = self._mesh
        return 1 if mesh is None else mesh.group_size(*expert_axes(mesh))

    @property
    def _mesh(self) -> Mesh | None:
        return gpc.mesh if gpc.is_initialized(ParallelMode.GLOBAL) else None

    def get_info(self, num_experts: int) -> tuple[int, MoeParallelInfo]:
        """How many of ``num_experts`` a rank holds, and how they are shared out.  All ranks must call it."""
        mesh = self._mesh
        if mesh is None:
            return num_experts, MoeParallelInfo(1, 1)
        axes = expert_axes(mesh, num_experts)
        size = mesh.group_size(*axes)
        if size not in self.parallel_info_dict:
            others = tuple(a for a in mesh.size if a in DATA_AXES and a not in axes)
            groups = [mesh.group(*some) if some else None for some in (axes, others)]
            self.parallel_info_dict[size] = MoeParallelInfo(size, mesh.group_size(*others), *groups)
        return num_experts // size, self.parallel_info_dict[size]

    # ---- The losses of routers ----

    def reset_loss(self) -> None:
        """Forget the losses that no one has taken."""
        self.begin()

    def add_loss(self, loss: Any, z_loss: Tensor | None = None, maker: Any = None) -> RouterLosses:
        """Add the loss by which a router is balanced, and its router-z loss; ``maker`` is the layer."""
        has_grad = torch.is_grad_enabled()
        hidden = not has_grad and _is_hidden()
        learns = has_grad or hidden
        model = _called_model(maker) if learns else None
        self._passes[learns].come(maker, model)
        if self._passes[learns].is_over(maker, has_grad=has_grad):
            self._passes[learns] = _RouterPass()
            self._passes[learns].come(maker, model)
        if learns:
            self._passes[False] = _RouterPass()
        now = self._passes[learns]
        now.hidden = now.hidden or hidden
        balance = loss if isinstance(loss, Tensor) else torch.tensor(loss)
        losses = RouterLosses(balance, torch.zeros_like(balance) if z_loss is None else z_loss)
        layer = _reference(maker)
        if not has_grad and now.made and now.made[-1].maker == layer:
            # one layer again and again: a list would grow with each call
            now.made[-1].losses = now.made[-1].losses.plus(losses)
        else:
            now.made.append(_Made(losses, layer, getattr(maker, "training", True), now.call))
        return losses

    def watch(self, losses: RouterLosses, outputs: Tensor) -> None:
        """Let ``losses`` end with ``outputs`` of their layer: with the backward pass, or when another layer
        comes and nothing is left of them.
        """
        hook = partial(self._forget, losses)
        outputs.register_hook(hook)
        for each in self._passes[True].made:
            if each.losses is losses:
                each.way_back = weakref.ref(hook)

    def _forget(self, losses: RouterLosses, grad: Tensor) -> None:
        last = self._passes[True]
        last.made = [each for each in last.made if each.losses is not losses]

    def get_loss(self) -> Any:
        """The sum of the losses that balance the routers; 0.0 if there are none."""
        losses = self.losses()
        return 0.0 if losses is None else losses.balance

    @property
    def _last(self) -> _RouterPass:
        mode = torch.is_grad_enabled()
        return self._passes[mode if self._passes[mode].made else not mode]

    @property
    def are_hidden(self) -> bool:
        """Whether some of the losses were made in a checkpoint with ``use_reentrant=True``: their gradients
        would be lost.
        """
        return self._last.hidden

    def losses(self) -> RouterLosses | None:
        """All losses of the last forward pass; None if there are none."""
        last = self._last
        last.forget_left_over()
        last.taken = True
        if not last.made:
            return None
        total = last.made[0].losses
        for each in last.made[1:]:
            total = total.plus(each.losses)
        return total

    def begin(self, losses: RouterLosses | None = None) -> None:
        """Begin a forward pass, with the ``losses`` of layers that ran elsewhere."""
        self._passes = {True: _RouterPass(), False: _RouterPass()}
        if losses is not None:
            self._passes[torch.is_grad_enabled()].made.append(_Made(losses, None, True))

    def take(self) -> RouterLosses | None:
        """The losses of the forward pass, which then begins anew."""
        losses = self.losses()
        self.begin()
        return losses


MOE_CONTEXT = MoeContext()
