"""One file with everything a run needs to go on: epoch, model, optimizer and scheduler.

``colossalai.utils`` offers these two functions under their documented names.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from colossalai.checkpoint_io.files.compare import check_shapes
from colossalai.checkpoint_io.files.gathering import OwnOptimizer, names_of, ties_in
from colossalai.checkpoint_io.files.io import GatheredCheckpointIO, whole_state
from colossalai.checkpoint_io.files.state_file import load_shard_state_dict, save_state_dict
from colossalai.checkpoint_io.stored_optimizer import NAMES, StoredOptimizer
from colossalai.interface import ModelWrapper, below_compile, user_module
from colossalai.logging import get_dist_logger
from colossalai.utils.optimizer_state import check_state

# In a file that was written within an epoch: how many of its batches are in the weights.
STEP_IN_EPOCH = "step_in_epoch"


def save_checkpoint(
    file: str | Path,
    epoch: int,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    lr_scheduler: Any = None,
    **kwargs: Any,
) -> None:
    """Write one file of the whole model, whatever the plan.

    In a distributed job every rank calls this, and rank 0 writes.

    Further keywords (plain values and tensors) are kept in the file beside the rest.
    """
    io = GatheredCheckpointIO()
    weights = whole_state(io.model_parts(model, float("inf")), model)
    state = {"epoch": epoch, "model": weights, **kwargs}
    if optimizer is not None:
        state["optimizer"] = _whole_optimizer(optimizer, model, io)
    if lr_scheduler is not None:
        state["lr_scheduler"] = lr_scheduler.state_dict()
    io.run_write(partial(save_state_dict, state, file))


def save_moe_model(model: nn.Module, path: str | Path) -> None:
    """Write one file of the weights of ``model``, with the experts of all ranks; every rank calls this.

    ``colossalai.nn.layer.moe`` offers it under its documented name, and ``load_moe_model``.
    """
    GatheredCheckpointIO().save_model(model, path)


def load_moe_model(model: nn.Module, path: str | Path, strict: bool = True) -> None:
    """Load what ``save_moe_model`` wrote, under any plan: each rank takes its own experts.

    Not ``strict``: missing and unknown weights are passed over.
    """
    GatheredCheckpointIO().load_model(model, path, strict)


def _whole_optimizer(optimizer: Optimizer, model: nn.Module, io: GatheredCheckpointIO) -> dict[str, Any]:
    """Gather the state dict of the serial optimizer, with the names of its parameters."""
    state = io.optimizer_parts(optimizer, model)
    return state.file(state.parts(float("inf")))


def load_checkpoint(
    file: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    lr_scheduler: Any = None,
    strict: bool = True,
) -> int:
    """Load what ``save_checkpoint`` wrote; returns the epoch in which it was written.

    Not ``strict``: missing and unknown weights are passed over.
    """
    state = load_training(file, model, optimizer, lr_scheduler, strict)
    if (seen := state.get(STEP_IN_EPOCH)) is not None:
        get_dist_logger().warning(
            f"{file} was written within epoch {state['epoch']}, after {seen} of its batches; the epoch that"
            " is returned"
            " does not say so. trainer.resume(file, lr_scheduler) goes on with the next batch",
            ranks=[0],
        )
    return int(state["epoch"])


def load_training(
    file: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    lr_scheduler: Any = None,
    strict: bool = True,
) -> dict[str, Any]:
    """``load_checkpoint`` that returns all the file holds."""
    state = load_shard_state_dict(file)
    wanted = {"model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler}
    absent = [name for name, part in wanted.items() if part is not None and name not in state]
    if "epoch" not in state or absent:
        raise RuntimeError(
            f"{file} is not a checkpoint with {', '.join(absent) or 'an epoch'}; it holds"
            f" {', '.join(map(str, state))}"
        )
    module, io = user_module(model), GatheredCheckpointIO()
    check_shapes(module, state["model"], Path(file))
    if optimizer is not None:  # before anything is changed
        try:
            state["optimizer"] = _own_optimizer(optimizer, model, state, io)
            check_state(optimizer, state["optimizer"])
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"{file} does not fit the optimizer: {error}") from error
    if io.ranks.size > 1 or isinstance(
        below_compile(model), ModelWrapper
    ):  # a plan may keep weights elsewhere
        io.load_weights(model, [(Path(file), state["model"])], Path(file), strict)
    else:
        try:
            module.load_state_dict(state["model"], strict=strict)
        except RuntimeError as error:
            raise RuntimeError(f"{file} does not fit the model: {error}") from error
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
    if lr_scheduler is not None:
        lr_scheduler.load_state_dict(state["lr_scheduler"])
    return state


def _own_optimizer(
    optimizer: Optimizer, model: nn.Module, file: dict[str, Any], io: GatheredCheckpointIO
) -> dict[str, Any]:
    """Renumber and cut the optimizer in ``file`` as the parameters of this rank are."""
    # older versions wrote the names beside the optimizer
    stored, parts = StoredOptimizer.open_state_dict(file["optimizer"], file.get(NAMES))
    names = names_of(optimizer, model).agree(io.ranks)
    ties = ties_in(file["model"], stored.numbers)
    return OwnOptimizer(optimizer, names, stored, by_names=True, ties=ties).state_dict(parts, io.fit)
