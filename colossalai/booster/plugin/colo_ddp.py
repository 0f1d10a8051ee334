"""``ColoDDP``: the older name of data parallelism for a model that a script trains by itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from colossalai.booster.plugin.ddp import TorchDDPModel
from colossalai.tensor import ProcessGroup
from colossalai.utils.parallel import DDP_IGNORED

WRAPPED = "_colo_in_ddp"  # the attribute of a parameter whose gradients a ColoDDP averages


class ColoDDP(TorchDDPModel):
    """A model whose gradients are averaged over the data-parallel ranks of ``process_group``.

    It is torch's ``DistributedDataParallel`` with the names of the user's module, which is ``model.module``.
    ``model.backward(loss)`` and ``loss.backward()`` are the same; any optimizer of the parameters steps with
    the averages.

    Args:
        process_group: its dp ranks are replicas, which start with the weights of the first of them; its tp
            ranks may cut ColoParameters between them.  A group of torch is taken as the replicas.
        bucket_cap_mb: gradients are averaged in buckets of this size, while the backward pass goes on.
        rebuild_bucket: order the buckets anew after the first step, in the order in which gradients come.
            Then every parameter must get a gradient in each backward pass, which is refused otherwise; with
            False, some may get none.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroup | dist.ProcessGroup,
        bucket_cap_mb: float = 25,
        rebuild_bucket: bool = True,
    ) -> None:
        if isinstance(process_group, ProcessGroup):
            process_group = process_group.dp_process_group()
        if not isinstance(process_group, dist.ProcessGroup):
            raise TypeError(
                "ColoDDP takes a colossalai.tensor.ProcessGroup as process_group, got"
                f" {type(process_group).__name__}: {process_group!r}"
            )
        super().__init__(
            module,
            process_group,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=not rebuild_bucket,
            refuse=_refuse,
        )
        for param in module.parameters():
            setattr(param, WRAPPED, True)

    @staticmethod
    def set_params_to_ignore(params_to_ignore: Iterable[Tensor]) -> None:
        """Leave these parameters alone: each rank keeps its own weights and gradients of them.

        Call it before the model is wrapped.
        """
        params_to_ignore = list(params_to_ignore)
        for param in params_to_ignore:
            if not isinstance(param, Tensor):
                raise TypeError(
                    "set_params_to_ignore takes parameters, got"
                    f" {type(param).__name__} {param!r}; pass [model.get_parameter(name), ...] for names"
                )
            if getattr(param, WRAPPED, False):
                raise RuntimeError(
                    f"a parameter of shape {tuple(param.shape)} belongs to a ColoDDP already, which averages"
                    " its gradients; call set_params_to_ignore before ColoDDP(model, ...)"
                )
            setattr(param, DDP_IGNORED, True)

    @property
    def module(self) -> nn.Module:  # type: ignore[override]
        """The user's module, as scripts of old expect; DDP lies between."""
        return self.unwrap()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of ``loss``."""
        loss.backward(*args, **kwargs)


def _refuse(missing: list[str]) -> None:
    raise RuntimeError(
        f"{len(missing)} parameters have got no gradient in the backward pass"
        f" ({', '.join(missing[:3])}{', ...' * (len(missing) > 3)}), and ColoDDP averages when it has all;"
        " pass rebuild_bucket=False, freeze them, or name them in set_params_to_ignore, before the model is"
        " wrapped"
    )
