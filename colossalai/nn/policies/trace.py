"""A plan is tried on the meta device before a model is cut: one forward pass of a twin whose tensors have shapes only.

The twin runs twice, whole and then with small stand-ins for the layers that the plan cuts.  What works whole and fails cut is
refused, with the module that fails.  In the second pass ``Flow`` follows what is cut, and tells which parameters need their
gradients summed and which dropouts need numbers of their own.  A model that cannot be run so (inputs that nobody knows,
code that reads values) is not traced; the comparison of gradients in the first step is there for it.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.mesh import placement
from colossalai.mesh._compat import without_modes
from colossalai.nn.policies.adapt import UsedByPieces
from colossalai.nn.policies.flow import Flow, Mark, Notes
from colossalai.nn.policies.numbers import draws_own, switch_numbers
from colossalai.nn.policies.rules import Cut, Head, Rule, Table, World

BATCH, LENGTH = 2, 8
Match = tuple[str, nn.Module, Rule]


@dataclass
class Trace:
    """What a model needs beside its plan, by the paths of its modules."""

    summed: dict[str, frozenset[str]] = field(default_factory=dict)
    """Modules with those of their parameters that are applied to pieces."""
    own: tuple[str, ...] = ()
    """Modules that drop cut features, outside a module that draws its own numbers."""
    alike: tuple[str, ...] = ()
    """Modules that drop what all ranks hold, inside a module that draws its own numbers."""
    cut_attentions: bool | None = None
    """Whether the attentions that the model returns hold this rank's heads; None if it returns none."""


def trace(model: nn.Module, matches: list[Match], world: World) -> Trace | None:
    """Run a twin of ``model`` under the plan; None if even the whole model cannot be run on the meta device."""
    with without_modes(), torch.random.fork_rng(devices=[]), torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = _find_inputs(model)
        return None if found is None else _run(model, matches, world, *found)


def _run(model: nn.Module, matches: list[Match], world: World, inputs: dict[str, Any], truth: bool) -> Trace:
    flow = Flow(draws_own, truth)
    twin, problem = _cut_twin(model, matches, world, flow), ""
    with flow, _following(twin, flow):
        for value in inputs.values():
            if isinstance(value, Tensor):
                flow.mark(value, Mark(given=True))
        for name, param in twin.named_parameters():
            cut = bool(placement(param).sharded)
            flow.mark(
                param, Mark(cut=cut, learns=True) if cut else Mark(learns=True, params=frozenset([name]))
            )
        try:
            out = twin(**inputs)
        except PlanError:
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {error}".split("\n")[0]
    who = type(model).__name__
    if problem:
        raise ValueError(
            f"{who}, module {_named(flow.path[-1])}: it works whole, but fails when the plan cuts its inputs "
            f"({problem}), so this plan does not fit the model; pass policy=colossalai.nn.policies.Policy(...), or do without "
            "tensor parallelism"
        )
    _check(who, flow.notes)
    attentions = next((out[n] for n in ("attentions", "decoder_attentions") if _get(out, n)), None)
    first = next((a for a in attentions or () if isinstance(a, Tensor)), None)
    return Trace(
        _by_module(twin, flow.notes),
        tuple(flow.notes.drawn_alike),
        tuple(flow.notes.drawn_own),
        None if first is None else flow.of(first).cut,
    )


class PlanError(ValueError):
    """A layer of the plan is given what it does not take."""


def _get(out: Any, name: str) -> Any:
    return out.get(name) if hasattr(out, "get") else None


def _named(path: str) -> str:
    return repr(path or "the model itself")


def _check(who: str, notes: Notes) -> None:
    if notes.statistics:
        path, name = next(iter(notes.statistics.items()))
        raise ValueError(
            f"{who}, module {_named(path)}: it takes a {name} over features of which the plan leaves each rank a piece, so the "
            "result would be that of the piece; pass a policy=colossalai.nn.policies.Policy(...) that leaves the linears around it whole"
        )
    if notes.crossings:
        raise ValueError(
            f"{who}, module {_named(next(iter(notes.crossings)))}: an activation that all ranks hold meets features of which each has a "
            "piece, outside of a layer that the plan cuts; the gradients of what it was made of would be parts of "
            "their sums. Pass a policy=colossalai.nn.policies.Policy(...) that cuts it or leaves the linears around it whole"
        )
    both = [name for name in notes.applied_to_pieces if name in notes.applied_to_whole]
    if both:
        raise ValueError(
            f"{who}: parameter {both[0]!r} is applied to activations that all ranks hold and to features of which each has a "
            "piece; its gradients would be summed wrongly. Pass a policy=colossalai.nn.policies.Policy(...) that leaves the linears around it "
            "whole"
        )


def _by_module(twin: nn.Module, notes: Notes) -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for name in notes.applied_to_pieces:
        path, _, param = name.rpartition(".")
        if not isinstance(twin.get_submodule(path), UsedByPieces):
            found.setdefault(path, set()).add(param)
    return {path: frozenset(names) for path, names in found.items()}


# ---- the twin ----


def _twin(model: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {}
    for param in model.parameters():
        memo[id(param)] = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    twin = copy.deepcopy(model, memo)
    configs = {id(c): c for m in twin.modules() if (c := getattr(m, "config", None)) is not None}
    for config in configs.values():
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = "eager"  # the only one that returns attentions
    for module in twin.modules():
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            getattr(module, hooks).clear()  # the user's: they must not see this pass
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False  # type: ignore[assignment]
    return twin.train()


def _cut_twin(model: nn.Module, matches: list[Match], world: World, flow: Flow) -> nn.Module:
    twin = _twin(model)
    trial = World(world.tp, world.mesh)
    for name, _, rule in matches:
        module = twin.get_submodule(name)
        new = _stand_in(name, module, rule, trial, flow) or rule.cut(module, trial)
        if new is not module:
            parent, _, last = name.rpartition(".")
            setattr(twin.get_submodule(parent), last, new)
    return twin


def _stand_in(path: str, module: nn.Module, rule: Rule, world: World, flow: Flow) -> nn.Module | None:
    parts = world.mesh.group_size(*world.tp.inner.dims[-1])
    if isinstance(rule, Cut) and rule.role != "stay":
        weight = module.weight
        assert isinstance(weight, Tensor)
        n_in, n_out = weight.shape if type(module).__name__ == "Conv1D" else weight.shape[::-1]
        if rule.role == "expand":
            return _Layer(path, flow, n_in, n_out // parts, cut_input=False, cut_output=True)
        return _Layer(
            path,
            flow,
            n_in if rule.whole_input else n_in // parts,
            n_out,
            not rule.whole_input,
            cut_output=False,
        )
    if isinstance(rule, Head) and isinstance(module, nn.Linear):
        return _Layer(path, flow, module.in_features, module.out_features, False, False, module.weight)
    if isinstance(rule, Table) and isinstance(module, nn.Embedding):
        return _Layer(path, flow, None, module.embedding_dim, False, False, module.weight)
    return None


class _Layer(nn.Module):
    """Stands in for a layer that is cut: checks what it is given, and returns a tensor of the right shape."""

    def __init__(
        self,
        path: str,
        flow: Flow,
        n_in: int | None,
        n_out: int,
        cut_input: bool,
        cut_output: bool,
        weight: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.path, self.flow, self.n_in, self.n_out = path, flow, n_in, n_out
        self.cut_input, self.cut_output = cut_input, cut_output
        # models ask layers for the dtype of their weights; a tied weight is that of a stand-in as well
        self.weight = nn.Parameter(torch.empty(n_out, n_in or 1)) if weight is None else weight
        self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        mark = self.flow.of(x)
        if mark.cut is not self.cut_input:
            held, wanted = ("a piece", "the whole") if mark.cut else ("the whole", "a piece")
            raise PlanError(
                f"the plan cuts {self.path!r} as a layer that is given {wanted} of its input features, but the ranks hold {held} "
                "there; pass policy=colossalai.nn.policies.Policy(...)"
            )
        if self.n_in is not None and x.size(-1) != self.n_in:
            raise RuntimeError(f"its input has {x.size(-1)} features, the plan expects {self.n_in}")
        if self.cut_input and mark.dim not in (None, 1):
            raise PlanError(f"the plan cuts {self.path!r} along other features than its input is cut along")
        y = torch.empty(
            *(x.shape[:-1] if self.n_in is not None else x.shape), self.n_out, dtype=self.weight.dtype
        )
        switch_numbers(own=self.cut_output)
        dim = 1 if self.cut_output else None
        return self.flow.mark(y, Mark(self.cut_output, dim, given=True, learns=True))


@contextmanager
def _following(twin: nn.Module, flow: Flow) -> Iterator[None]:
    """``flow.path`` ends with the module that runs, or that ran last when an error was raised."""

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: flow.path.append(name)

    def leave(*_: Any) -> None:
        flow.path.pop()

    with ExitStack() as stack:
        for name, module in twin.named_modules():
            stack.callback(module.register_forward_pre_hook(enter(name)).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        yield


# ---- inputs ----


def _find_inputs(model: nn.Module) -> tuple[dict[str, Any], bool] | None:
    """Arguments with which the whole model runs on the meta device, and what its conditions are taken for."""
    for inputs in _candidates(model):
        for truth in (False, True):
            twin = _twin(model)
            try:
                with Flow(draws_own, truth):
                    twin(**inputs)
            except Exception:
                continue
            return inputs, truth
    return None


def _candidates(model: nn.Module) -> Iterator[dict[str, Any]]:
    forward = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in forward.values())
    options = {"use_cache": False, "return_dict": True}
    known = {k: v for k, v in options.items() if k in forward or takes_any}
    ids = torch.empty(BATCH, LENGTH, dtype=torch.long, device="meta")
    tries: list[dict[str, Any]] = []
    if "input_ids" in forward:
        tries += [{"input_ids": ids}, {"input_ids": ids, "decoder_input_ids": ids}]
    if "pixel_values" in forward:
        config: Any = getattr(model, "config", None)
        size, channels = getattr(config, "image_size", 224), getattr(config, "num_channels", 3)
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        tries.append({"pixel_values": torch.empty(BATCH, channels, height, width, device="meta")})
    for inputs in tries:
        if set(inputs) <= set(forward):
            yield {**inputs, **known, "output_attentions": True}
            yield {**inputs, **known}
