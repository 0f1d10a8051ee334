"""Checkpoints of several ranks in files of whole tensors: one file, or a folder that Hugging Face opens.

Saving brings one tensor at a time together, and only the rank that writes keeps it, on its CPU: all of the file that is being
written, never more.  Loading reads the files on every rank, and each keeps its own part.  So a checkpoint does not know
by how many ranks it was written, or under which plan.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai.checkpoint_io.boxes import whole
from colossalai.checkpoint_io.entries import is_piece, pieces_of, serial_shape, shared_mark
from colossalai.checkpoint_io.files import save_state_dict
from colossalai.checkpoint_io.gathering import Gathering, Part
from colossalai.checkpoint_io.general import Names, write_model_shards, write_optimizer_shards
from colossalai.checkpoint_io.model_state import ModelState
from colossalai.checkpoint_io.numbered_optimizer import NumberedState
from colossalai.checkpoint_io.replicated import ReplicatedCheckpointIO
from colossalai.checkpoint_io.sharding import plan_shards
from colossalai.interface import user_module
from colossalai.mesh import PIPELINE_AXIS
from colossalai.utils.parallel import launched_mesh

# The attribute of a parameter of an optimizer that is a slice of one of the model; its ``fit`` cuts a loaded value.
PIECE = "zero_piece"


class GatheredCheckpointIO(ReplicatedCheckpointIO):
    """Saving is a collective, as in ``ReplicatedCheckpointIO``; so is loading into the stages of a pipeline."""

    def fit(self, value: Any, target: Any) -> Any:
        """Cut a whole tensor like ``target``; one of another shape is left to the error that follows, or is a count."""
        if (piece := getattr(target, PIECE, None)) is not None:
            return piece.fit(self.fit(value, piece.param))
        if not isinstance(target, Tensor) or not isinstance(value, Tensor) or value.shape == ():
            return value
        if tuple(value.shape) != serial_shape(target) or not is_piece(target):
            return value
        room = torch.empty_like(target, dtype=value.dtype, requires_grad=False)
        for own in pieces_of(target, room, launched_mesh(), "a tensor of the checkpoint"):
            own.view().copy_(value[own.box.within(whole(tuple(value.shape)))])
        return room

    def names(self, module: nn.Module) -> Names:
        """As the stages of a pipeline together know them: each gets the tensors it shares with others under all their names."""
        found = super().names(module)
        if not _has_stages():
            return found
        own = {name: shared_mark(t) for name, t in module.state_dict(keep_vars=True).items()}
        marks = {serial: own[names[0]] for serial, names in found.here.items()}
        for theirs in self.ranks.gather(marks):
            found.elsewhere |= theirs.keys()
            for serial, mark in theirs.items():
                for here in [name for name, own_mark in marks.items() if mark and own_mark == mark]:
                    found.here.setdefault(serial, found.here[here])
        return found

    def load_weights(
        self, model: nn.Module, parts: Iterable[tuple[Path, dict[str, Any]]], checkpoint: Path, strict: bool
    ) -> None:
        failure = None
        try:
            super().load_weights(model, parts, checkpoint, strict)
        except Exception as error:
            if not _has_stages():
                raise
            failure = error
        if _has_stages():  # what one stage lacks, the others do not know
            self.ranks.agree(failure, what="load the model")

    def save_unsharded_model(
        self, model: nn.Module, checkpoint: Path, gather_dtensor: bool, use_safetensors: bool
    ) -> None:
        _check(gather_dtensor)
        parts = self.model_parts(model, float("inf"))
        metadata = getattr(user_module(model).state_dict(keep_vars=True), "_metadata", None)

        def write() -> None:
            state = OrderedDict(next(parts, ({}, 0.0))[0])
            state._metadata = metadata  # type: ignore[attr-defined]
            save_state_dict(state, checkpoint, use_safetensors)

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
        parts = self.model_parts(model, size_per_shard)
        self._write_while_gathering(
            partial(write_model_shards, parts, checkpoint, variant, use_safetensors), parts
        )

    def model_parts(self, model: nn.Module, size_per_shard: float) -> Iterator[Part]:
        """The state dict of the serial model in parts; what modules add to it (``get_extra_state``) is in the last one."""
        gathering = Gathering(lambda: ModelState(model).entries(), self.ranks)
        extra: dict[str, Any] = {}
        for theirs in reversed(self.ranks.gather(ModelState(model).extra)):
            extra |= theirs
        return self._with_extra(gathering, extra, size_per_shard)

    def _with_extra(
        self, gathering: Gathering, extra: dict[str, Any], size_per_shard: float
    ) -> Iterator[Part]:
        waiting: Part | None = None
        for part, size in gathering.parts(size_per_shard):
            if waiting is not None:
                yield waiting
            waiting = {name.removeprefix("model/"): value for name, value in part.items()}, size
        found, size = waiting or ({}, 0.0)
        if found or extra:
            yield found | extra, size

    def save_unsharded_optimizer(self, optimizer: Optimizer, checkpoint: Path, gather_dtensor: bool) -> None:
        _check(gather_dtensor)
        state = NumberedState(optimizer)
        parts = self.optimizer_parts(state, float("inf"))

        def write() -> None:
            save_state_dict(state.state_dict(next(parts, ({}, 0.0))[0]), checkpoint)

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
        state = NumberedState(optimizer)
        parts = self.optimizer_parts(state, size_per_shard)
        write = partial(write_optimizer_shards, parts, state.rest(spread=True), checkpoint, prefix)
        self._write_while_gathering(write, parts)

    def optimizer_parts(
        self, state: NumberedState, size_per_shard: float
    ) -> Iterator[tuple[dict[int, Any], float]]:
        """The states of the serial optimizer by the numbers of parameters, in parts."""
        gathering = Gathering(state.entries, self.ranks)
        plain: dict[int, dict[str, Any]] = {}
        for theirs in reversed(self.ranks.gather(state.plain())):
            plain |= theirs
        names: dict[int, list[str]] = {number: [] for number in plain}
        for name in gathering.plan.tensors:
            names.setdefault(int(name.split("/")[1]), []).append(name)
        return self._by_number(state, gathering, plain, names, size_per_shard)

    def _by_number(
        self,
        state: NumberedState,
        gathering: Gathering,
        plain: dict[int, dict[str, Any]],
        names: dict[int, list[str]],
        size_per_shard: float,
    ) -> Iterator[tuple[dict[int, Any], float]]:
        sizes = [([number], sum(map(gathering.size, names[number]))) for number in sorted(names)]
        for numbers, size in plan_shards(sizes, size_per_shard):
            yield (
                {
                    n: {state.key(name): gathering.whole(name) for name in names[n]} | plain.get(n, {})
                    for n in numbers
                },
                size,
            )

    def _write_while_gathering(self, write: Callable[[], None], parts: Iterator[Any]) -> None:
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


def _has_stages() -> bool:
    mesh = launched_mesh()
    return mesh is not None and mesh.size.get(PIPELINE_AXIS, 1) > 1


def _check(gather_dtensor: bool) -> None:
    if not gather_dtensor:
        raise ValueError(
            "gather_dtensor=False asks for a checkpoint of cut tensors, but this plan stores whole ones; leave it out, or use"
            " booster.save"
        )
