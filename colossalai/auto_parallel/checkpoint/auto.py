"""``auto_checkpoint``: any model trained within a number of bytes, as fast as recomputation allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from colossalai.auto_parallel.checkpoint.plan import CheckpointPlan
from colossalai.auto_parallel.checkpoint.planner import CheckpointPlanner
from colossalai.auto_parallel.checkpoint.ranks import tell_error
from colossalai.auto_parallel.checkpoint.share import SharesModel
from colossalai.device.presets import DevicePreset


def auto_checkpoint(
    model: nn.Module,
    batch: Any,
    memory: int | str,
    *,
    criterion: Callable[..., Any] | None = None,
    optimizer: Optimizer | None = None,
    autocast: torch.dtype | None = None,
    reserved: int | str = 0,
    device: str | DevicePreset | None = None,
    measure: bool | None = None,
    blocks: Sequence[str] | None = None,
    stored: int = 1,
    regions: bool = True,
    plugin: SharesModel | None = None,
    accumulates: bool = False,
    compiled: bool = False,
    time_limit: float = 10.0,
) -> CheckpointPlan:
    """Let each block of ``model`` keep, recompute or offload its activations, so that a training step needs
    at most ``memory`` and the least time.

    Call it before ``boost``, as ``checkpoint_blocks``.  The model is changed in place, or not at all if
    there is an error, on this rank or another; ``print`` the result to see what was chosen, and where the
    memory goes.

    Args:
        model: any model, in training; it may lie on the CPU or the meta device, and is not run there but for
            one whose shapes depend on values, and an LSTM or GRU on a CPU, of which such runs leave no trace.
        batch: one batch, of which the shapes matter: a tensor, a tuple of arguments, a dict of keywords or
            ``Arguments(args, kwargs)`` for ``model``; with a ``criterion``, ``(data, label)`` or a dict with
            ``labels``.
        memory: bytes of the whole step at its worst moment, such as ``"20 GiB"``: weights, gradients, states
            of the optimizer, activations.
        criterion: the loss, called with the output and the label; without it, the ``loss`` that the model
            returns.
        optimizer: counts its states and its step; without it, there is none.
        autocast: the dtype of ``torch.autocast`` around the forward pass.
        reserved: bytes for whatever else is on the device.
        device: ``"a100"``, ``"h100"``, ``"h200"``, ``"cpu"`` ..., whose speed the times are computed for; by
            default, the device of the model.
        measure: run each kind of block on the GPU, for its true times and workspaces; by default where the
            model lies on one.
        blocks: names of the modules to choose for, by default found.
        stored: how many micro-batches are stored at one time; more than 1 for a stage of a pipeline, of which
            ``batch`` is one micro-batch.
        regions: let several blocks be computed again together, where that is the only or the faster way;
            ``False`` for a model that ``torch.compile`` compiles, if ``compiled`` cannot be used.
        plugin: the plugin of the ``Booster`` that will train the model; what it divides over ranks or moves
            to the host is counted as it will lie on this rank. Gemini's chunks get the room that is left.
        accumulates: gradients of batches before lie there during the forward pass, as with gradient
            accumulation, or ``zero_grad(set_to_none=False)``; by default there are none.
        compiled: plan for the bytes and times of steps that ``torch.compile`` has compiled; needs the model
            on a GPU, and a few compilations.
        time_limit: seconds for each solution; after that, the best that was found, with its gap.
    """
    try:
        planner = CheckpointPlanner(
            model,
            batch,
            criterion=criterion,
            optimizer=optimizer,
            autocast=autocast,
            reserved=reserved,
            device=device,
            measure=measure,
            blocks=blocks,
            stored=stored,
            regions=regions,
            plugin=plugin,
            accumulates=accumulates,
            compiled=compiled,
        )
    except Exception as error:
        tell_error(error)  # the other ranks wait for it in their plan
        raise
    plan = planner.plan(memory, time_limit)
    planner.apply(plan)
    return plan
