"""What the layers of a mixture of experts share: their places in the job, and the losses of their routers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

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


class MoeContext:
    """Holds the losses that routers made in the forward pass, until the loss of the model takes them.

    A forward pass is over, and its losses are forgotten, when they were taken and another pass begins; when
    the backward pass comes by their layers (``forget``); and where gradients are switched on or off.  Without
    gradients, it is over when its first layer is called again after others; a model that has one layer in
    many places calls ``reset_loss`` at the start.
    """

    def __init__(self) -> None:
        self.is_initialized = False
        self.use_kernel_optim = True
        self.parallel_info_dict: dict[int, MoeParallelInfo] = {}
        self._losses: list[RouterLosses] = []
        self._makers: list[Any] = []
        self._taken = False
        self._with_grad = True

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
        grad = torch.is_grad_enabled()
        if self._taken or self._with_grad != grad or (not grad and self._comes_again(maker)):
            self.begin()
        balance = torch.as_tensor(loss)
        losses = RouterLosses(balance, torch.zeros_like(balance) if z_loss is None else z_loss)
        self._losses.append(losses)
        self._makers.append(maker)
        return losses

    def _comes_again(self, maker: Any) -> bool:
        makers = self._makers
        return bool(makers) and makers[0] is maker and any(other is not maker for other in makers)

    def forget(self, losses: RouterLosses) -> None:
        """Forget ``losses``: the backward pass of their layer has begun, so its forward pass is over."""
        place = next((i for i, each in enumerate(self._losses) if each is losses), None)
        if place is not None:
            del self._losses[place], self._makers[place]

    def get_loss(self) -> Any:
        """The sum of the losses that balance the routers; 0.0 if there are none."""
        losses = self.losses()
        return 0.0 if losses is None else losses.balance

    def losses(self) -> RouterLosses | None:
        """All losses of the last forward pass; None if there are none."""
        self._taken = True
        if not self._losses:
            return None
        total = self._losses[0]
        for losses in self._losses[1:]:
            total = total.plus(losses)
        return total

    def begin(self, losses: RouterLosses | None = None) -> None:
        """Begin a forward pass, with the ``losses`` of layers that ran elsewhere."""
        self._losses, self._taken = [] if losses is None else [losses], False
        self._makers = [None] * len(self._losses)
        self._with_grad = torch.is_grad_enabled()

    def take(self) -> RouterLosses | None:
        """The losses of the forward pass, which then begins anew."""
        losses = self.losses()
        self.begin()
        return losses


MOE_CONTEXT = MoeContext()
