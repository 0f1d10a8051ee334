"""The memory of a data-parallel rank under ZeRO, by formula.

Under ZeRO-3 ranks hold a part of the model each and fetch the rest in turn.

With N ranks and P parameters, a rank holds 2 P / N bytes of weights in half precision, as many of gradients,
and 12 P / N of masters and optimizer states; on the device or, with ``tensor_placement_policy='cpu'``, in the
memory of the host.  There ``undo_ratio`` of weights, masters and states lies twice, if the plan asks for
speculative updates in the backward pass (with None these take only what the host has to spare).  The device
also holds the unit (a block of the model) that is being computed, whole, the next one, which is fetched
meanwhile, and the unit's gradients.  ZeRO-1 and 2 keep the weights whole.  The activations are those of a
rank that holds everything, found as in ``estimate``; so are those of a stage of a pipeline, in half
precision.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from colossalai._numeric import ceil_div
from colossalai.booster.plugin import GeminiPlugin
from colossalai.context.config import ConfigException
from colossalai.core import global_context as gpc
from colossalai.dry_run.watch import MemoryEstimate
from colossalai.engine.gemini_section import read_gemini
from colossalai.interface.batch import call_with, loss_of, split_batch
from colossalai.mesh.parameter import SHARED_GROUP
from colossalai.nn.policies.cutting.experts import play_even_loads
from colossalai.utils.meta import MetaBytes, gpu_kernels
from colossalai.utils.parallel import is_cut_over_rows, pieces_over_rows
from colossalai.zero.gemini.chunk_filling import check_shares

HALF_BYTES, MASTER_AND_STATES_BYTES = 2, 12
UNITS_WHOLE = 2  # the one that is computed and the one that is fetched
POLICIES = ("cpu", "cuda")
DEFAULTS = {name: option.default for name, option in inspect.signature(GeminiPlugin).parameters.items()}


class ZeroPlan(NamedTuple):
    """The meaning of a ``zero`` section: its level, whether states rest on the host, and which share is there
    twice.

    ``updates_early``: weights are updated in the backward pass, for good.
    """

    level: int
    on_host: bool
    undo_ratio: float = 0.0
    updates_early: bool = False


def zero_plan(zero: Mapping[str, Any]) -> ZeroPlan:
    level = zero.get("level", 3)
    if level != 3:
        return ZeroPlan(level, bool(zero.get("cpu_offload")))
    options = {**DEFAULTS, **read_gemini(zero).options}
    check_shares(undo_ratio=options["undo_ratio"])
    policy = options["placement_policy"]
    if policy not in POLICIES:
        raise ConfigException(
            f"a dry run knows zero.model_config.tensor_placement_policy {' and '.join(map(repr, POLICIES))},"
            f" got {policy!r}"
        )
    may_be_bad = options["max_norm"] or options["precision"] in (None, "fp16")
    asked = options["update_in_backward"]
    on_trial = asked is None or (asked and may_be_bad)  # snapshots, on the host
    early = bool(asked) and not may_be_bad
    return ZeroPlan(level, policy == "cpu", options["undo_ratio"] if on_trial else 0.0, early)


def estimate_zero(
    model: nn.Module,
    criterion: Callable[..., Any] | None,
    batch: Any,
    ranks: int,
    plan: ZeroPlan,
) -> MemoryEstimate:
    """What one of ``ranks`` data-parallel ranks needs.  ``model`` is the whole one, on the meta device."""
    model.to(torch.half)
    stored, workspace = _passes(model, criterion, batch)
    played = MemoryEstimate(activations=stored, workspace=workspace, moment="backward")
    return divided(played, model, ranks, plan)


def divided(played: MemoryEstimate, model: nn.Module, ranks: int, plan: ZeroPlan) -> MemoryEstimate:
    """The memory of a rank that was played in half precision with all of ``model``, if it has a part: one of
    ``ranks``.
    """
    level, on_host, undo_ratio, _ = plan
    parameters = sum(p.numel() for p in model.parameters())
    part, experts = _part(model, ranks), sum(p.numel() for p in model.parameters() if is_cut_over_rows(p))
    unit = HALF_BYTES * _largest_unit(model)
    rests = 0 if on_host else part  # elements whose masters and states lie on the device
    # gradients are whole until they are averaged, which level 1 does for all at the end
    # of experts at the end of the backward pass, for all levels
    gradients = HALF_BYTES * parameters if level == 1 else unit + HALF_BYTES * (rests + experts)
    if level == 3:  # those of weights that stages share are whole until the step
        gradients += HALF_BYTES * sum(p.numel() for p in model.parameters() if hasattr(p, SHARED_GROUP))
    weights = UNITS_WHOLE * unit + HALF_BYTES * rests if level == 3 else HALF_BYTES * parameters
    host = (2 * HALF_BYTES if level == 3 else HALF_BYTES) + MASTER_AND_STATES_BYTES
    kept = undo_ratio * (HALF_BYTES + MASTER_AND_STATES_BYTES)
    return replace(
        played,
        weights=weights,
        masters=4 * rests,
        states=8 * rests,
        gradients=gradients,
        buckets=0,
        host=int((host + kept) * part) if on_host else 0,
    )


def _part(model: nn.Module, ranks: int) -> int:
    """The elements of which one of ``ranks`` has the states; ranks with the same experts divide those."""
    by_sharers: dict[int, int] = {}
    for p in model.parameters():
        sharers = ranks // pieces_over_rows(p)
        by_sharers[sharers] = by_sharers.get(sharers, 0) + p.numel()
    return sum(ceil_div(elements, sharers) for sharers, elements in by_sharers.items())


def _largest_unit(model: nn.Module) -> int:
    """The parameters of the largest element of a ``ModuleList``, or of everything outside of such lists."""
    blocks = [block for m in model.modules() if isinstance(m, nn.ModuleList) for block in m]
    inside = {p for block in blocks for p in block.parameters()}
    outside = sum(p.numel() for p in model.parameters() if p not in inside)
    return max([outside, *(sum(p.numel() for p in block.parameters()) for block in blocks)])


def _in_float32(output: Any) -> Any:
    return output.float() if isinstance(output, Tensor) else output


def _passes(model: nn.Module, criterion: Callable[..., Any] | None, batch: Any) -> tuple[int, int]:
    """Bytes that a forward pass keeps, and what both passes need beside them; gradients go as soon as they
    are there.
    """
    data, label = split_batch(batch, None, criterion is not None, "a dry run")
    data, label = tree_map_only(Tensor, lambda t: t.to("meta"), (data, label))
    play_even_loads(model, gpc.mesh)
    hooks = [p.register_post_accumulate_grad_hook(_forget) for p in model.parameters()]
    try:
        with gpu_kernels(), MetaBytes() as memory:
            memory.hold(model.parameters())
            weights = memory.now
            loss = loss_of(criterion, _in_float32(call_with(model, data)), label)
            stored = memory.now - weights
            loss.backward()
            return stored, memory.peak - weights - stored
    finally:
        for hook in hooks:
            hook.remove()


def _forget(parameter: Tensor) -> None:
    parameter.grad = None
