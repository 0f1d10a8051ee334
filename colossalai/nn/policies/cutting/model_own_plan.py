"""The plan that a model itself carries: ``base_model_tp_plan`` of its config and ``_tp_plan`` of its class.

Such a plan names linear layers as column- or row-wise, in the words of transformers, and nothing else; so it
serves 1D.  What it says of experts and of latent attention is not read: how these are cut follows from their
modules (:mod:`experts`, :mod:`latent_attention`).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from colossalai.nn.policies.cutting.experts import find_experts
from colossalai.nn.policies.cutting.latent_attention import latent_attention_rules
from colossalai.nn.policies.cutting.policy import Policy, fits
from colossalai.nn.policies.cutting.rules import Cut, Head, Heads, Pieces, Rule, Table

STYLES: dict[str, Rule | None] = {
    "colwise": Cut("expand"),
    "rowwise": Cut("contract"),
    "rowwise_split_input": Cut("contract", whole_input=True),
    "rowwise_rep": Cut("contract", whole_input=True),
    "packed_colwise": Cut("expand", fused=2),
    "packed_rowwise": Cut("contract"),
    "colwise_gather_output": Head(),
    "colwise_rep": Head(),
    "embedding_rowwise": Table(),
    "replicated_with_grad_allreduce": Pieces("inner"),
    "replicate": None,
}


def carried_policy(model: nn.Module) -> Policy | None:
    """The plan of ``model`` as a policy, if it has one."""
    plan: dict[str, Any] = dict(getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {})
    if not plan:
        return None
    for owner in type(model).__mro__:
        plan = {**(vars(owner).get("_tp_plan") or {}), **plan}
    rules: dict[str, Rule] = dict(latent_attention_rules(model))
    for path, style in _without_experts(model, plan).items():
        if path in rules or any(fits(path, latent) for latent in rules):
            continue
        if style not in STYLES:
            raise ValueError(
                f"the tensor-parallel plan of {type(model).__name__} asks for style {style!r} at {path!r},"
                f" which parallelize does not know (it knows {', '.join(STYLES)}); pass"
                " policy=colossalai.nn.policies.Policy(...)"
            )
        rule, parent = STYLES[style], path.rpartition(".")[0]
        if rule is not None:
            rules[path] = rule
        if style == "colwise" and "att" in parent.rpartition(".")[2]:
            rules[parent] = Heads()
    if not any(isinstance(rule, Cut) for rule in rules.values()):
        return None  # it speaks of experts alone
    _add_shared_experts(model, rules)
    _leave_special_tables(model, rules)
    _follow_ties(model, rules)
    kind = str(getattr(model.config, "model_type", "this model"))
    cuts_heads = any(isinstance(rule, Heads) for rule in rules.values())
    heads = ("num_attention_heads", "num_key_value_heads") if cuts_heads else ()
    return Policy((kind,), rules, heads, only_1d=True)


def _without_experts(model: nn.Module, plan: dict[str, Any]) -> dict[str, Any]:
    """``plan`` without the modules that hold experts, and their weights."""
    names = [name for name, _, _ in find_experts(model)]
    return {
        path: style
        for path, style in plan.items()
        if not any(fits(name, path) or fits(name, path.rpartition(".")[0] or path) for name in names)
    }


def _add_shared_experts(model: nn.Module, rules: dict[str, Rule]) -> None:
    """An expert that all tokens go through is cut as any other MLP, also where the plan does not name it, as
    that of Qwen2-MoE.
    """
    for name, module in model.named_modules():
        path = name.rpartition(".")[2]
        layers = [f"{path}.{layer}" for layer, below in module.named_children() if type(below) is nn.Linear]
        if not path.startswith("shared_expert") or any(fits(rule, at) for rule in rules for at in layers):
            continue
        if set(layers) == {f"{path}.{layer}" for layer in ("gate_proj", "up_proj", "down_proj")}:
            contract = f"{path}.down_proj"
            rules |= {at: STYLES["rowwise" if at == contract else "colwise"] for at in layers}  # type: ignore[misc]


def _leave_special_tables(model: nn.Module, rules: dict[str, Rule]) -> None:
    """Tables that do more than look entries up, such as those of Gemma, which scale them, stay whole."""
    for name, module in model.named_modules():
        for path in [path for path, rule in rules.items() if isinstance(rule, Table) and fits(name, path)]:
            if type(module) is not nn.Embedding:
                del rules[path]


def _follow_ties(model: nn.Module, rules: dict[str, Rule]) -> None:
    """A plan names the head only: a table that is tied to it is cut as well, or neither where the table is
    special.
    """
    try:
        table, head = (
            getattr(model, f"get_{side}_embeddings", lambda: None)() for side in ("input", "output")
        )
    except NotImplementedError:  # a tower of images has neither
        return
    if table is None or head is None or table.weight is not head.weight:
        return
    paths = {id(module): name for name, module in model.named_modules()}
    if type(table) is nn.Embedding:
        rules[paths[id(table)]] = Table()
    else:
        rules.pop(paths[id(head)], None)
