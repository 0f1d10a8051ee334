"""What our optimizers share: parameters are gathered into lists that one kernel updates in few launches.

A parameter in half precision has its weights in float32 as well: an update is often smaller than the rounding
of half precision and would be lost.  The kernel writes the rounded weights into the parameter in the same
pass.  Moments are float32 too.  The optimizer's state holds the float32 weights as ``master``, or, where the
parameter is bfloat16 and the optimizer ``splits``, the 16 bits that the parameter lacks as ``tail`` (see
``colossalai.kernel.optimizer.split``).

A script may write into a parameter between two steps, as loading a model does: see
[Note: which weights count] in ``colossalai.nn.optimizer.refresh_masters``.

Parameters that are cut over ranks (``DTensor``) are updated in their local
parts, if the update is element by element.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from colossalai._numeric import HALF_DTYPES
from colossalai.kernel import _compat
from colossalai.kernel.optimizer.split import join, tail_of
from colossalai.mesh import placement
from colossalai.nn.optimizer.refresh_masters import UncountedWrites, current_master
from colossalai.tensor import ColoTensor
from colossalai.tensor.pieces import as_piece
from colossalai.utils.lazy_tensor import fetch_later, is_lazy
from colossalai.utils.optimizer_state import check_state

VARIANTS = ("amsgrad", "maximize")
DTYPES = (torch.float32, torch.float64, *HALF_DTYPES)


@dataclass
class KernelBatch:
    """Parameters of one group that one call of a kernel updates: same device, dtypes and number of steps."""

    step: int
    weights: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    halves: list[Tensor] = field(default_factory=list)
    tails: list[Tensor] = field(default_factory=list)
    states: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    def add(self, weight: Tensor, grad: Tensor, master: Tensor | None, tail: Tensor | None) -> None:
        """A parameter without its states."""
        if master is not None:
            self.halves.append(weight)
            weight = master
        if tail is not None:
            self.tails.append(tail)
        if not (grad.is_contiguous() and weight.is_contiguous()) and grad.stride() != weight.stride():
            grad = torch.empty_like(weight, dtype=grad.dtype).copy_(grad)
        self.weights.append(weight)
        self.grads.append(grad)


class MultiTensorOptimizer(Optimizer):
    """A subclass names its states, which start as zeros, and writes ``update``."""

    elementwise = True  # every element of a parameter is updated without knowing the others
    splits = False  # ``update`` takes the weights of a bfloat16 parameter as the parameter and its tail
    divides = False  # ``step`` and ``step_on`` take a ``div_scale``
    keeps = False  # ``step_on`` takes memory for what was before (``kept``)
    devices: tuple[str, ...] = ()  # where parameters may be; empty: anywhere
    _compares = False  # in this step, parameters with their masters

    @abstractmethod
    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The tensors that each parameter of the group has in the optimizer's state."""

    @abstractmethod
    def update(self, batch: KernelBatch, group: dict[str, Any]) -> None:
        """Update the parameters of a batch in place; ``batch.step`` counts from 1."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.check_variants({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dtype not in DTYPES:
                raise TypeError(
                    f"{type(self).__name__} updates parameters of {', '.join(str(d) for d in DTYPES)};"
                    f" got one of {parameter.dtype}, shape {tuple(parameter.shape)}"
                )

    def check_variants(self, group: dict[str, Any]) -> None:
        """Refuse options of torch's optimizers that change what a step
        computes, and that our kernels do not have.
        """
        for name in VARIANTS:
            if group.get(name):
                raise ValueError(
                    f"{type(self).__name__} has no {name} variant, so it cannot take a parameter group with"
                    f" {name}={group[name]!r}; use the optimizer of torch for it"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        ``closure`` computes the loss again, and is called first.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update([(group, group["params"]) for group in self.param_groups])
        return loss

    @torch.no_grad()
    def step_on(self, parameters: Iterable[Tensor]) -> None:
        """``step`` for those of ``parameters`` that have a gradient, and nothing else.

        Hooks of ``step`` are not called.

        For a plan that updates one part of a model after the other: every part is updated with the options
        that its groups have now.  Calls may come from another thread, but only one at a time.
        """
        wanted = {id(p) for p in parameters}
        self._update(
            [(group, [p for p in group["params"] if id(p) in wanted]) for group in self.param_groups]
        )

    def _update(self, groups: list[tuple[dict[str, Any], list[Tensor]]]) -> None:
        self._compares = self.uncounted.is_due()
        for _, parameters in groups:  # all of them, before the first is changed
            for parameter in parameters:
                if (grad := parameter.grad) is not None and (
                    grad.is_sparse or self.devices or not self.elementwise
                ):
                    self.check(parameter)
        ready = [(group, list(self.batches(group, parameters))) for group, parameters in groups]
        self.prepare([batch for _, batches in ready for batch in batches])
        for group, batches in ready:
            for batch in batches:
                self.update(batch, group)
        for _, parameters in groups:
            for parameter in parameters:
                if parameter.grad is not None and parameter.dtype in HALF_DTYPES:
                    self.versions[parameter] = parameter._version

    def prepare(self, batches: list[KernelBatch]) -> None:
        """What must be known of all gradients before the first update."""

    def batches(self, group: dict[str, Any], parameters: list[Any]) -> Iterable[KernelBatch]:
        """Those of the ``parameters`` of ``group`` that have a gradient.

        Their number of steps goes up by one.
        """
        # This runs for every parameter in every step, while a GPU may be waiting: no call is made without
        # need.
        names = self.state_names(group)
        parameters = [p for p in parameters if p.grad is not None]
        states = [self._ready_state(p, names) for p in parameters]
        if not parameters:
            return []
        counters = [state["step"] for state in states]
        _compat.add_(counters, 1)
        found: dict[tuple[Any, ...], KernelBatch] = {}
        for parameter, state, step in zip(parameters, states, torch.stack(counters).tolist(), strict=True):
            grad, dtype = parameter.grad, parameter.dtype
            part = local if type(parameter) is not torch.nn.Parameter else _itself
            key = (step, dtype, grad.dtype, parameter.device)
            batch = found.get(key)
            if batch is None:
                batch = found[key] = KernelBatch(int(step))
            master = tail = None
            if dtype in HALF_DTYPES:
                if self.extra(parameter) == "tail":
                    tail = part(state["tail"])
                else:
                    master = part(state["master"])
            batch.add(part(parameter), part(grad), master, tail)
            for name in names:
                batch.states[name].append(part(state[name]))
        return found.values()

    def _ready_state(self, parameter: Tensor, names: tuple[str, ...]) -> dict[str, Any]:
        """The state of a parameter that is about to be updated."""
        state: dict[str, Any] = self.state[parameter]
        missing = [name for name in ("step", *names) if name not in state]
        if missing:
            self.start(parameter, state, missing)
        if parameter.dtype in HALF_DTYPES:
            self.refresh_master(parameter, state)
        return state

    def start(self, parameter: Tensor, state: dict[str, Any], names: Iterable[str]) -> None:
        """The entries ``names`` of a parameter's state, before its first step."""
        for name in names:
            state[name] = (
                torch.tensor(0.0) if name == "step" else torch.zeros_like(parameter, dtype=wide(parameter))
            )
        if parameter.dtype in HALF_DTYPES and not {"master", "tail"} & state.keys():
            if self.extra(parameter) == "tail":  # the parameter is exact: nothing is missing
                state["tail"] = torch.zeros_like(parameter, dtype=torch.int16)
            else:
                state["master"] = parameter.detach().to(wide(parameter))

    def extra(self, parameter: Tensor) -> str:
        """How the state of a half-precision parameter holds the digits that the parameter lacks."""
        return "tail" if self.splits and parameter.dtype == torch.bfloat16 else "master"

    def refresh_master(self, parameter: Tensor, state: dict[str, Any]) -> None:
        """Bring the float32 weights in line with a parameter that others
        changed [Note: which weights count].
        """
        has_changed = self.versions.get(parameter) != parameter._version
        self.versions[parameter] = parameter._version
        now = local(parameter.detach())
        if self.extra(parameter) == "master":
            self.uncounted.refresh_(
                local(state["master"]), now, has_changed=has_changed, compares=self._compares
            )
        elif "master" in state:  # begun or loaded
            state["tail"] = torch.zeros_like(parameter, dtype=torch.int16)
            local(state["tail"]).copy_(tail_of(local(state.pop("master")), now))
        elif has_changed:
            state["tail"].zero_()

    def master(self, parameter: Tensor) -> Tensor:
        """The weights of ``parameter`` as the optimizer knows them: in float32,
        if the parameter is in half precision.

        For a parameter that is cut over ranks this is the local part.
        """
        state, now = self.state.get(parameter, {}), local(parameter.detach())
        if "master" in state:
            if is_lazy(state["master"]):  # so is the weight, which no script can have written to
                return state["master"]
            kept = local(state["master"])
            # a tail rounds ties up, and torch to even
            splits = self.extra(parameter) == "tail" and kept.device == now.device
            return join(now, tail_of(kept, now)) if splits else current_master(kept, now)
        if "tail" not in state:
            return now
        return now.to(wide(parameter)) if self.is_stale(parameter) else join(now, local(state["tail"]))

    def is_stale(self, parameter: Tensor) -> bool:
        """Whether others wrote to ``parameter`` after our last step.

        Not if a plan steps a copy of it, as Gemini does.
        """
        return self.versions.get(parameter, parameter._version) != parameter._version

    @property
    def uncounted(self) -> UncountedWrites:
        """When this optimizer compares its parameters with its masters."""
        return self.__dict__.setdefault("_uncounted", UncountedWrites())

    @property
    def versions(self) -> dict[Tensor, int]:
        """How often each half-precision parameter had been written to, after our last step."""
        return self.__dict__.setdefault("_versions", {})  # a copied or unpickled optimizer starts without

    def check(self, parameter: Tensor) -> None:
        """Refuse a parameter or gradient that the kernels cannot update."""
        who, shape = type(self).__name__, tuple(parameter.shape)
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            raise RuntimeError(
                f"{who} does not take sparse gradients; the parameter of shape {shape} has one."
                f" Use torch.optim.SparseAdam for it, or a layer with sparse=False"
            )
        if self.devices and parameter.device.type not in self.devices:
            raise RuntimeError(
                f"{who} updates parameters on {' or '.join(self.devices)}; the parameter of shape {shape} is"
                f" on {parameter.device}. HybridAdam takes both"
            )
        if not self.elementwise and is_cut(parameter):
            raise RuntimeError(
                f"{who} needs the norm of whole parameters; the parameter of shape {shape} is cut over ranks"
                " (DTensor or tensor parallelism). Use an optimizer that works element by element, such as"
                " HybridAdam"
            )

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Free the gradients, or set them to zero.

        By default as ``set_grad_none`` says, if the optimizer has it.
        """
        default = self.defaults.get("set_grad_none", True)
        super().zero_grad(default if set_to_none is None else set_to_none)

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = {**self.__dict__, **state}.get("defaults", {})
        has_option = "differentiable" in own
        super().__setstate__(state)
        if not has_option:  # torch adds it, and groups would no longer be those that were saved
            self.defaults.pop("differentiable", None)
        for group in self.param_groups:  # a state of the optimizer of torch lacks some of our options
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def state_dict(self) -> dict[str, Any]:
        """torch's, with the float32 weights of half-precision parameters as ``master``."""
        found = super().state_dict()
        for index, parameter in zip(_indices(found["param_groups"]), self._parameters(), strict=True):
            if index in found["state"]:
                found["state"][index] = self.portable_state(parameter)
        return found

    def portable_state(self, parameter: Tensor) -> dict[str, Any]:
        """The state of ``parameter`` with its master instead of a tail, which
        means nothing without the parameter.
        """
        state = dict(self.state[parameter])
        if {"tail", "master"} & state.keys() and not is_lazy(state.get("master")):
            master = torch.empty_like(parameter, dtype=torch.float32, requires_grad=False)
            local(master).copy_(self.master(parameter))
            state["master"] = master
            state.pop("tail", None)
        return state

    def lazy_state(self, parameter: Tensor) -> dict[str, Any]:
        """``portable_state``, in which a function stands for a tensor that must
        first be computed: for checkpoints.
        """
        state = dict(self.state.get(parameter, {}))
        if {"tail", "master"} & state.keys() and not is_lazy(state.get("master")):
            state.pop("tail", None)
            state["master"] = partial(self.master, parameter)
        return {name: fetch_later(value) for name, value in state.items()}

    def states_replaced(self) -> None:
        """A checkpoint has put other states into ``state``, and maybe other values into parameters."""
        self.versions.clear()

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles."""
        portable = defaultdict(dict, {p: self.portable_state(p) for p in self.state})
        return {**super().__getstate__(), "state": portable}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this optimizer, or of the one of torch with the same formula."""
        check_state(self, state_dict)
        for group in state_dict["param_groups"]:
            self.check_variants(group)
        super().load_state_dict(state_dict)
        # torch casts states to the dtype of the parameter, and leaves their strides as they were
        saved_state, indices = state_dict["state"], _indices(state_dict["param_groups"])
        for index, parameter in zip(indices, self._parameters(), strict=True):
            state = self.state.get(parameter, {})
            for name, value in saved_state.get(index, {}).items():
                if name == "step":
                    state[name] = torch.as_tensor(value, dtype=torch.float32).cpu().clone()
                elif torch.is_tensor(value) and value.shape == parameter.shape:
                    state[name] = torch.zeros_like(parameter, dtype=wide(parameter)).copy_(value)
            if state and parameter.dtype in HALF_DTYPES:
                state.pop("tail", None)
                state.setdefault("master", parameter.detach().to(wide(parameter)))

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]


def _indices(param_groups: list[dict[str, Any]]) -> list[int]:
    return [index for group in param_groups for index in group["params"]]


def wide(parameter: Tensor) -> torch.dtype:
    """The dtype in which a parameter is updated."""
    return torch.float32 if parameter.dtype in HALF_DTYPES else parameter.dtype


def is_dtensor(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")  # its class is expensive to import


def is_cut(tensor: Tensor) -> bool:
    """Whether other ranks hold other parts of the same tensor."""
    return is_dtensor(tensor) or bool(placement(tensor).sharded)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; it shares memory with it."""
    if is_dtensor(tensor):
        return tensor.to_local()  # type: ignore[attr-defined]
    return as_piece(tensor) if isinstance(tensor, ColoTensor) else tensor


def check_betas(owner: Optimizer, betas: Any) -> None:
    """Two decay rates of moments, or an error."""
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise TypeError(
            f"{type(owner).__name__} needs two numbers as betas, such as (0.9, 0.999); got {betas!r}"
        )
    check_rates(owner, beta1=(betas[0], 0.0, 1.0), beta2=(betas[1], 0.0, 1.0))


def check_rates(owner: Optimizer, **limits: tuple[float, float, float]) -> None:
    """``name=(value, least, bound)``: least <= value < bound, or an error that
    names the optimizer and the argument.
    """
    for name, (value, least, bound) in limits.items():
        if not isinstance(value, Real | Tensor):
            raise TypeError(f"{type(owner).__name__} needs a number as {name}; got {value!r}")
        if not least <= value < bound:
            upper = "" if bound == float("inf") else f" and below {bound:g}"
            raise ValueError(
                f"{type(owner).__name__} needs {name} of at least {least:g}{upper}; got {value!r}"
            )
