"""Refuses outputs that a model collects from all of its blocks, of which a stage has only its own.

The last stage would return, and add to its loss, those of its own blocks alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

COLLECTED = ("hidden_states", "attentions", "router_logits", "router_probs")
# keywords of Hugging Face's models, and options of their configs
ASKS = tuple(f"output_{name}" for name in COLLECTED)


def refuse_configured(model: nn.Module) -> None:
    """Refuse a model whose config asks for outputs of all blocks."""
    for part in model.modules():
        config = getattr(part, "config", None)
        for name in ASKS:
            if getattr(config, name, False) is True:
                raise ValueError(
                    _words(type(model).__name__, f"config.{name}=True", f"set config.{name}=False")
                )


def refuse_asked(who: str, keywords: Mapping[str, Any], config: Any = None) -> None:
    """Refuse a call of a stage that asks for outputs of all blocks, or for a loss that is a sum."""
    for name in ASKS:
        if keywords.get(name) is True:
            raise ValueError(_words(who, f"{name}=True in the batch", "leave it out"))
    if keywords.get("num_items_in_batch") is not None:
        raise ValueError(
            f"{who} takes no num_items_in_batch: the model would divide the sum of a micro-batch by it, and a"
            " pipeline takes the mean over micro-batches; leave it out, so that the loss of each is a mean"
        )
    if getattr(config, "ctc_loss_reduction", None) == "sum" and keywords.get("labels") is not None:
        raise ValueError(
            f"{who} would sum the loss of a micro-batch (config.ctc_loss_reduction='sum'), and a pipeline"
            " takes the mean over micro-batches; set config.ctc_loss_reduction='mean'"
        )


def refuse_collected(model: nn.Module) -> None:
    """Let ``model``, the last stage, raise when a module inside returns outputs collected from its blocks."""
    for part in model.modules():
        if hasattr(part, "config") and part is not model:
            part.register_forward_hook(_check_output)


def check_output(who: str, output: Any) -> None:
    """Refuse the output of a stage, or of a module of it, that was collected from blocks."""
    if not isinstance(output, Mapping):
        return
    for name, value in output.items():
        if isinstance(value, tuple | list) and name.endswith(COLLECTED):
            raise ValueError(_words(who, f"{name!r} among its outputs", "ask the model for none"))


def _check_output(module: nn.Module, args: Any, output: Any) -> None:
    check_output(type(module).__name__, output)


def _words(who: str, what: str, advice: str) -> str:
    return (
        f"{who} cannot be a stage of a pipeline with {what}: a stage has the outputs of its own blocks alone,"
        " so what the model returns, and a router loss that it adds, would lack those of the other stages;"
        f" {advice}, or train without a pipeline"
    )
