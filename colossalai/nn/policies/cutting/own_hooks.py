"""What a script has hung on modules that ``parallelize`` replaces: kept where it still fits, else refused."""

from __future__ import annotations

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from colossalai.nn.policies.cutting.rules import CutContext, Rule, Table


def keeps_hooks(rule: Rule, context: CutContext) -> bool:
    """Whether forward hooks see the same as before: ids, and whole entries.

    ``enable_input_require_grads`` of transformers puts one on the table, and so does PEFT where activations
    are checkpointed.
    """
    return isinstance(rule, Table) and not context.stream_is_cut


FORWARD_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)


def check_own_hooks(who: str, module: nn.Module, kept: bool) -> None:
    """Refuse what a script has hung on a module that another will replace, and on its parameters."""
    hooks = (*(() if kept else FORWARD_HOOKS[:2]), "_backward_hooks", "_backward_pre_hooks")
    found = [name.strip("_") for name in hooks if getattr(module, name)]
    found += ["a forward of its own"] if "forward" in module.__dict__ else []
    found += ["parametrizations"] if is_parametrized(module) else []
    for name, p in module._parameters.items():
        if p is not None and (p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)):
            found.append(f"hooks of {name}")
    if found:
        raise ValueError(
            f"{who} has {', '.join(found)}, which parallelize would lose, since it puts a layer in its place"
            " that holds a piece; register hooks after parallelize, and leave parametrized modules out of"
            " the policy"
        )
