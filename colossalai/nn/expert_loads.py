"""A record of how the tokens of each training step were shared out among experts.

Routers of ours tell it for the tokens of all ranks.  A model of transformers has routers of its own, which
know this rank's tokens: what they chose is seen where its experts are called, and their scores where they
return them.  Of these, ranks add up their numbers at the end of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import colossalai.mesh.collectives as collectives
from colossalai.mesh import Axes, Mesh
from colossalai.mesh.mesh import DATA_AXES
from colossalai.nn.layer.moe.loads import LayerLoads, steps_to_keep
from colossalai.nn.layer.moe.routers import ExpertLoads, MoeRouter, Routing
from colossalai.nn.modes import current
from colossalai.nn.policies.cutting.experts import ExpertsElsewhere, holds_experts
from colossalai.nn.policies.sequences.inputs import CutSequence
from colossalai.nn.policies.sequences.plan import CutBody
from colossalai.utils.activation_checkpoint import is_computed_again
from colossalai.utils.device import get_current_device

# Numbers wait on the device for as many steps at most; then the host waits for them.
_WAITING = 100


class LoadHistory:
    """Records the loads of all routers of a model: ``step()`` ends a step, of one or more micro-batches, and
    every rank calls it.

    The routers are ``MoeRouter``s and those of transformers' models.  The numbers are those of all ranks, so
    one rank's record is enough; in a pipeline each has those of its stages.  The last ``keep`` steps are
    kept.  ``mesh`` is that of the launched job unless given.
    """

    def __init__(self, model: nn.Module, keep: int = 1000, mesh: Mesh | None = None) -> None:
        self._keep = steps_to_keep(keep)
        self._pending: dict[str, list[ExpertLoads]] = {}
        self._steps: list[dict[str, list[ExpertLoads]]] = []
        self._layers: dict[str, LayerLoads] = {}
        own = [(name, m) for name, m in model.named_modules() if isinstance(m, MoeRouter)]
        self._foreign = _ForeignLoads(model, current().mesh if mesh is None else mesh)
        if not own and not self._foreign.layers:
            raise ValueError(
                f"{type(model).__name__} has no router whose loads could be recorded: neither a MoeLayer, nor"
                " a module of transformers that holds all experts of a layer"
            )
        self._hooks = [router.register_forward_hook(self._noting(name)) for name, router in own]
        self._hooks += self._foreign.hooks

    def _noting(self, name: str) -> Any:
        name = name.removesuffix(".router").removesuffix(".moe_layer") or "experts"

        def note(router: nn.Module, args: Any, routing: Routing) -> None:
            if router.training and not is_computed_again():
                self._pending.setdefault(name, []).append(routing.loads)

        return note

    def step(self) -> None:
        """End a step; where routers are those of transformers, ranks add up their numbers."""
        for name, loads in self._foreign.step():
            self._pending.setdefault(name, []).append(loads)
        if self._pending:
            self._steps.append(self._pending)
            self._pending = {}
        if len(self._steps) >= _WAITING:
            self._read()

    def close(self) -> None:
        """Record no more."""
        for hook in self._hooks:
            hook.remove()

    @property
    def layers(self) -> dict[str, LayerLoads]:
        """The loads of each layer; this waits for the device."""
        self._read()
        return self._layers

    def _read(self) -> None:
        steps, self._steps = self._steps, []
        for step in steps:
            for name, parts in step.items():
                tokens = torch.stack([part.tokens for part in parts]).sum(0).tolist()
                if name in self._foreign.layers and not sum(tokens):
                    continue  # no training: ranks add up zeros then, as none knows of the others
                dropped = int(torch.stack([part.dropped for part in parts]).sum())
                entropy = float(torch.stack([part.entropy for part in parts]).mean())
                self._layers.setdefault(name, LayerLoads()).add(tokens, dropped, entropy, self._keep)


class _ForeignLoads:
    """Counts what routers of transformers choose."""

    def __init__(self, model: nn.Module, mesh: Mesh | None) -> None:
        modules = dict(model.named_modules())
        self._cut = next((m.cut for m in modules.values() if isinstance(m, CutBody)), None)
        self._mesh = mesh if self._cut is None else self._cut.sequence.mesh
        self.layers: dict[str, _LayerSums] = {}
        self.hooks: list[Any] = []
        for path, experts in modules.items():
            if not isinstance(experts, ExpertsElsewhere) and not holds_experts(experts):
                continue
            sums = _LayerSums(experts.num_experts, self._cut)
            home, _, own = path.rpartition(".")
            self.layers[home or "experts"] = sums
            self.hooks.append(experts.register_forward_pre_hook(sums.count_choices, with_kwargs=True))
            for name, router in modules[home].named_children() if path else ():
                if name != own and any(p.ndim == 2 and len(p) == sums.experts for p in router.parameters()):
                    self.hooks.append(router.register_forward_hook(sums.count_scores))

    @property
    def _rows(self) -> Axes:
        """The axes whose ranks have other tokens; a sequence that this model does not cut is none of them."""
        if self._mesh is None:
            return ()
        data = tuple(axis for axis in self._mesh.size if axis in DATA_AXES)
        return data if self._cut is None else data + self._cut.sequence.axes

    @torch.no_grad()
    def step(self) -> Iterator[tuple[str, ExpertLoads]]:
        """The numbers of all ranks since the last step."""
        if not self.layers:
            return
        taken = [sums.take() for sums in self.layers.values()]
        every = torch.cat([numbers.to(taken[0].device) for numbers in taken])
        for axis in self._rows:
            assert self._mesh is not None
            every = collectives.all_reduce(every, self._mesh, axis)
        sizes = [sums.experts + 2 for sums in self.layers.values()]
        for name, numbers in zip(self.layers, every.split(sizes), strict=True):
            entropy = numbers[-2] / numbers[-1]  # nan where no router told its scores
            yield name, ExpertLoads(numbers[:-2].long(), torch.zeros_like(numbers[-1]), entropy)


class _LayerSums:
    """How often each expert of a layer was chosen, and the entropy of the scores, over the tokens of this
    rank since the last step.
    """

    def __init__(self, experts: int, cut: CutSequence | None) -> None:
        self.experts, self._cut = experts, cut
        self._sums: Tensor | None = None

    def count_choices(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before the experts are called with tokens, choices and weights: only choices are whole numbers."""
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        chosen = next((x for x in given if not x.is_floating_point()), None)
        if chosen is None or not module.training or is_computed_again():
            return
        with torch.no_grad():
            chosen = chosen.reshape(-1, chosen.size(-1))
            real = self._real(len(chosen), chosen.device)[:, None].expand_as(chosen)
            counts = self._at(chosen.device)[: self.experts]
            counts.scatter_add_(0, chosen.flatten().long(), real.flatten())

    def count_scores(self, router: nn.Module, args: Any, output: Any) -> None:
        """After the router: its first output are the logits of each token."""
        logits = next((x for x in tree_leaves(output) if isinstance(x, Tensor)), None)
        if logits is None or logits.size(-1) != self.experts or not router.training or is_computed_again():
            return
        with torch.no_grad():
            scores = logits.reshape(-1, self.experts).float().log_softmax(-1)
            real = self._real(len(scores), scores.device)
            entropy = -(scores.exp() * scores).sum(-1).double()
            self._at(scores.device)[self.experts :] += torch.stack([(entropy * real).sum(), real.sum()])

    def _real(self, tokens: int, device: torch.device) -> Tensor:
        """1 for tokens, 0 for what pads a sequence that is cut to equal parts."""
        one = torch.ones(tokens, dtype=torch.float64, device=device)
        if self._cut is None:
            return one
        real = self._cut.sequence.are_tokens(self._cut.length, device).double()
        return real.repeat(tokens // len(real)) if tokens % len(real) == 0 else one

    def _at(self, device: torch.device) -> Tensor:
        if self._sums is None:
            self._sums = torch.zeros(self.experts + 2, dtype=torch.float64, device=device)
        return self._sums

    def take(self) -> Tensor:
        """The numbers, which then begin anew."""
        sums, self._sums = self._at(get_current_device()), None
        return sums
