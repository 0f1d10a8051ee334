"""Checkpoints under a plan that cuts tensors over ranks; the files are those of whole tensors.

A cut tensor is one with a method ``full_tensor``, which every rank must call: ``DTensor``, or ZeRO's states in slices.

Saving gathers one tensor at a time, and only the rank that writes keeps it, on its CPU: all of the file that is being
written, never more.  Loading reads the files on every rank, and each keeps its own part.  So a checkpoint does not know
by how many ranks it was written, or under which plan.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai.checkpoint_io.files import save_state_dict
from colossalai.checkpoint_io.general import (
    write_model_shards,
    write_optimizer_shards,
)
from colossalai.checkpoint_io.replicated import ReplicatedCheckpointIO
from colossalai.checkpoint_io.sharding import plan_shards, size_of, spread_over_states
from colossalai.interface import user_module

Part = tuple[dict[Any, Any], float]

# The attribute of a parameter of an optimizer that is a slice of one of the model; its ``fit`` cuts a loaded value.
PIECE = "zero_piece"


class GatheredCheckpointIO(ReplicatedCheckpointIO):
    """Saving is a collective, as in ``ReplicatedCheckpointIO``; loading is not.

    Whole tensors may be among the others: they are taken from the rank that writes.
    """

    def fit(self, value: Any, target: Any) -> Any:
        """Cut a whole tensor like ``target``; one of another shape is left to the error that follows, or is a count."""
        if (piece := getattr(target, PIECE, None)) is not None:
            return piece.fit(value)
        if not is_cut(target) or not isinstance(value, Tensor) or value.shape != target.shape:
            return value
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)

    def save_unsharded_model(
        self, model: nn.Module, checkpoint: Path, gather_dtensor: bool, use_safetensors: bool
    ) -> None:
        _check(gather_dtensor)
        state = user_module(model).state_dict(keep_vars=True)
        parts = _gather(state, float("inf"), self.is_writer)

        def write() -> None:
            whole = OrderedDict(next(parts, ({}, 0.0))[0])
            whole._metadata = getattr(state, "_metadata", None)  # type: ignore[attr-defined]
            save_state_dict(whole, checkpoint, use_safetensors)

        self._write_while_gathering(write, parts)

    def save_sharded_model(
        self,
        model: nn.Module,
        checkpoint: Path,
        gather_dtensor: bool,
        variant: str | None,
        size_per_shard: float,
        use_safetensors: bool,
    ) -> None:
        _check(gather_dtensor)
        parts = _gather(user_module(model).state_dict(keep_vars=True), size_per_shard, self.is_writer)
        self._write_while_gathering(
            partial(write_model_shards, parts, checkpoint, variant, use_safetensors), parts
        )

    def save_unsharded_optimizer(self, optimizer: Optimizer, checkpoint: Path, gather_dtensor: bool) -> None:
        _check(gather_dtensor)
        rest = _state_of(optimizer)
        parts = _gather(rest.pop("state"), float("inf"), self.is_writer)
        rest = _whole(rest, self.is_writer)

        def write() -> None:
            save_state_dict({"state": next(parts, ({}, 0.0))[0], **rest}, checkpoint)

        self._write_while_gathering(write, parts)

    def save_sharded_optimizer(
        self,
        optimizer: Optimizer,
        checkpoint: Path,
        gather_dtensor: bool,
        prefix: str | None,
        size_per_shard: float,
    ) -> None:
        _check(gather_dtensor)
        states, rest = spread_over_states(_state_of(optimizer))
        parts = _gather(states, size_per_shard, self.is_writer)
        self._write_while_gathering(partial(write_optimizer_shards, parts, rest, checkpoint, prefix), parts)

    def _write_while_gathering(self, write: Callable[[], None], parts: Iterator[Part]) -> None:
        """``write`` takes the parts one by one on the rank that writes; the others help to gather each.

        If it fails, the rest is still gathered there, since the other ranks do not know yet.
        """
        failure: Exception | None = None
        if self.is_writer:
            try:
                write()
            except Exception as error:
                failure = error
        for _ in parts:
            pass
        self.agree(failure)


def is_cut(value: Any) -> bool:
    """Whether other ranks hold other parts of ``value``."""
    return isinstance(value, Tensor) and hasattr(value, "full_tensor")


def _state_of(optimizer: Optimizer) -> dict[str, Any]:
    """The state of an optimizer with its cut tensors as they are; what lies below wrappers answers."""
    ask: Callable[[], dict[str, Any]] = getattr(optimizer, "sharded_state_dict", optimizer.state_dict)
    return ask()


def _gather(state: Mapping[Any, Any], max_shard_size: float, keep: bool) -> Iterator[Part]:
    """The state in shards of whole values, gathered when asked for; without ``keep`` the values are None.

    Every rank must take the same shards.  A tensor under several names is one object here, and stays one.
    """
    units: dict[int, list[Any]] = {}
    for name, value in state.items():
        units.setdefault(id(value), []).append(name)
    sizes = [(names, size_of(state[names[0]])) for names in units.values()]
    for names, size in plan_shards(sizes, max_shard_size):
        whole = {key: _whole(value, keep) for key, value in {id(state[n]): state[n] for n in names}.items()}
        yield {name: whole[id(state[name])] for name in names}, size


def whole_tensor(value: Any) -> Tensor:
    """All of a cut tensor, on every rank, on a device where its backend can gather."""
    if not hasattr(value, "device_mesh"):
        return value.full_tensor()
    mesh = value.device_mesh
    # Under gloo the parts travel from host memory: torch 2.11 crashes when it gathers CUDA tensors there.  NCCL knows
    # the devices of the mesh only, while the parts of an offloaded tensor wait on the CPU.
    by_gloo = dist.get_backend(mesh.get_group(0)) == "gloo"
    return value.detach().to("cpu" if by_gloo else mesh.device_type).full_tensor()


def _whole(value: Any, keep: bool) -> Any:
    """``value`` without cuts, on the CPU of a rank that is to ``keep`` it; None on the others."""
    if isinstance(value, dict):
        return {name: _whole(inner, keep) for name, inner in value.items()}
    if is_cut(value):
        gathered = whole_tensor(value)
        return gathered.cpu() if keep else None
    if isinstance(value, Tensor):
        return value.detach().cpu() if keep else None
    return value if keep else None


def _check(gather_dtensor: bool) -> None:
    if not gather_dtensor:
        raise ValueError(
            "gather_dtensor=False asks for a checkpoint of cut tensors, but this plan stores whole ones; leave it out"
        )
