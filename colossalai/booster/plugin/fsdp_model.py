"""The model and the optimizer that ``TorchFSDPPlugin`` hands back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from inspect import ismethod
from typing import Any
from weakref import proxy

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai.booster.plugin.fsdp_lockstep import Lockstep, fsdp_params, has_gradient
from colossalai.booster.plugin.fsdp_outputs import check_written
from colossalai.booster.plugin.gradient_watch import GradientWatch
from colossalai.interface import ModelWrapper, OptimizerWrapper
from colossalai.interface.holding import RestingPlace
from colossalai.interface.nest import tensors
from colossalai.interface.optimizer import check_clip_value, local_gradients
from colossalai.mesh.backward import before_backward
from colossalai.mesh.gradient_norm import own_part
from colossalai.nn.checkpoint_blocks import outermost_blocks

# Which modules of a model are gathered and freed as one unit.
#
# A unit's weights are whole on every rank only while the unit computes. Small units save memory, large ones
# need fewer messages; by default each entry of an ``nn.ModuleList``, the blocks of a transformer, is a
# unit, and what is left belongs to the model itself.

Policy = Callable[..., bool]
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they are never called, so nothing would gather their weights


def find_units(model: nn.Module, policy: Policy | None, ignored: set[nn.Parameter]) -> list[nn.Module]:
    """The units below ``model``, inner ones first.

    A weight that is used inside and outside of a unit (tied) must belong to what holds both: such a module is
    no unit, and a policy that asks for it is refused.
    """
    wanted = outermost_blocks(model) if policy is None else _by_policy(model, policy, ignored)
    users: dict[nn.Parameter, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):  # a module in two places is used in both
        for p in module._parameters.values():
            if p is not None:
                users[p] = users.get(p, 0) + 1
    units = []
    for unit in wanted:
        torn = _torn(unit, users)
        if torn and policy is not None:
            name = next(name for name, module in model.named_modules() if module is unit)
            raise ValueError(
                f"auto_wrap_policy cuts {name!r} by itself, but its parameter {torn!r} is tied to one outside"
                " of it; tied parameters must be in one unit, so let the policy leave this module to its"
                " parent"
            )
        if not torn:
            units.append(unit)
    return units


def _torn(unit: nn.Module, users: dict[nn.Parameter, int]) -> str | None:
    """The first parameter that is also used outside of ``unit``."""
    inside: dict[nn.Parameter, int] = {}
    names: dict[nn.Parameter, str] = {}
    for prefix, module in unit.named_modules(remove_duplicate=False):
        for name, p in module._parameters.items():
            if p is not None:
                inside[p] = inside.get(p, 0) + 1
                names.setdefault(p, f"{prefix}.{name}" if prefix else name)
    return next((names[p] for p, count in inside.items() if count != users[p]), None)


def _by_policy(model: nn.Module, policy: Policy, ignored: set[nn.Parameter]) -> list[nn.Module]:
    """Ask a policy of ``torch.distributed.fsdp.wrap`` about every module, children first.

    It is called twice: with ``recurse=True`` whether to look at the children, then with ``recurse=False`` and
    the number of elements that no child took whether the module is a unit.
    """
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        size = sum(p.numel() for p in module.parameters() if p not in ignored)
        if module in found or not policy(module=module, recurse=True, nonwrapped_numel=size):
            return 0
        taken = sum(visit(child) for child in module.children())
        is_unit = policy(module=module, recurse=False, nonwrapped_numel=size - taken)
        if not is_unit or module is model or isinstance(module, _CONTAINERS):
            return taken
        found.append(module)
        return size

    visit(model)
    return found


def check_policy(policy: Any) -> None:
    if policy is not None and not callable(policy):
        raise TypeError(
            "auto_wrap_policy is called as policy(module=..., recurse=..., nonwrapped_numel=...), like those"
            f" of torch.distributed.fsdp.wrap; got {policy!r}, which cannot be called"
        )


MIXED = "mixed torch.Tensor and DTensor"  # how torch says that something computes with a weight that is cut


@torch.inference_mode(False)
def make_room(unit: Any) -> None:
    """Gather the weights of ``unit`` once: FSDP2 keeps the tensors."""
    if not all(hasattr(p, "_unsharded_param") for p in fsdp_params(unit)):
        unit.unshard()
        unit.reshard()


class TorchFSDPModel(ModelWrapper):
    """A model that ``fully_shard`` was applied to, in place: its names and structure are still the user's.

    FSDP2 leaves the weights of the outermost unit gathered after a forward pass, for the backward pass that
    will follow. If none does, it would compute with them again after they have changed; so they are freed in
    time.

    Args:
        module: the user's module, maybe in wrappers.
        units: what is gathered and freed as one.
        watch: of the parameters that FSDP2 cannot cut, which stay whole.
        lockstep: of several ranks, on what they gather and reduce.
    """

    releases_weights = True  # after the backward pass of a unit: no pass may come in parts
    keeps_parameters = True

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[nn.Module],
        watch: GradientWatch | None,
        lockstep: Lockstep | None,
    ) -> None:
        super().__init__(module)
        self._units: tuple[Any, ...] = tuple(units)
        self._watch, self._lockstep = watch, lockstep
        self._gathered = False
        self._is_local = self.gradients_are_local = False
        self._passing = False  # a backward pass has begun and not ended
        self._remember()

    def resting_places(self) -> dict[int, RestingPlace]:
        found = super().resting_places()
        for known in (param for unit in self._units for param in fsdp_params(unit)):
            local = known.sharded_param.to_local()
            place = RestingPlace(
                numel=local.numel(),
                dtype=local.dtype,
                tier=str(local.device),
                words=f"cut by FSDP over {known.mesh_info.shard_mesh_size} ranks",
            )
            # after a forward pass, the gathered one may still be the parameter of the module
            for param in (known.sharded_param, getattr(known, "_unsharded_param", None)):
                found[id(param)] = place
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._gathered and not torch.compiler.is_compiling():
            self.reshard()  # the module inside may have been called by itself
            self.check_parameters()
            if torch.is_inference_mode_enabled():  # none of its tensors could be trained with later
                for unit in self._units:
                    make_room(unit)
        self._gathered = True
        if torch.is_grad_enabled():
            self.gradients_are_local = self._is_local
        # a checkpoint repeats the pass in the backward pass
        watched = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() == -1
        if self._passing and watched:
            raise RuntimeError(
                "a backward pass of this model has failed, and FSDP2 keeps gradients of a half of it, which"
                " it would add to the next ones; start again from a checkpoint"
            )
        result = super().forward(*args, **kwargs)
        if not torch.is_grad_enabled():
            self.reshard()
        elif watched:
            before_backward((t for t in tensors(result) if t.requires_grad), self._begin_backward)
        return result

    def _begin_backward(self, grad: Tensor) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a backward pass with create_graph=True, but FSDP2 frees the weights that gradients of"
                " gradients need; use TorchDDPPlugin, or LowLevelZeroPlugin"
            )
        self._passing = True
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._passing = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} holds weights that are cut over the ranks of its job, so it cannot be"
            " copied or pickled; use booster.save_model, or p.full_tensor() of its parameters on every rank;"
            " an average of the weights is one of model.state_dict() (docs/source/en/booster.md)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.__reduce_ex__(4)  # torch's own words would not say what to do

    def hand_over(self) -> None:
        super().hand_over()
        user = self.unwrap()  # whose own methods would look at parts of weights
        for name, method in self.methods.items():
            if callable(getattr(user, name, None)):
                user.__dict__[name] = partial(method, proxy(self))

    def reshard(self) -> None:
        """Keep nothing but this rank's part of every weight."""
        for unit in self._units:
            unit.reshard()
        self._gathered = False

    def check_parameters(self) -> None:
        """Refuse weights that the user has replaced by others, or written to while they were gathered;
        nothing is gathered now.
        """
        check_written(self._units)
        for module, name, p in self._places:
            if module._parameters.get(name) is not p:
                full = next(
                    f"{path}.{name}" for path, child in self.unwrap().named_modules() if child is module
                )
                raise RuntimeError(
                    f"the parameter {full.lstrip('.')!r} was replaced by another after boost, but"
                    " TorchFSDPPlugin computes with the one that it has cut; change its values (p.copy_,"
                    " p.data = ..., load_state_dict), or replace it before boost"
                )

    def compare_ranks(self, what: str) -> None:
        """Raise if ranks have done different things since their forward pass, or do not all do ``what``
        now.
        """
        if self._lockstep is not None:
            self._lockstep.say(what)
            self._lockstep.compare()

    def check_reduced(self) -> None:
        """Refuse gradients that a backward pass has left whole, as each rank has computed them."""
        if any(has_gradient(p) for unit in self._units for p in fsdp_params(unit)):
            raise RuntimeError(
                "a backward pass has computed gradients that TorchFSDPPlugin has not reduced over the ranks:"
                " FSDP2 learns of a backward pass by the tensors that model(...) returns, in tuples, lists,"
                " dicts and dataclasses, and this loss came otherwise (an attribute, an object of another"
                " class, a closure). Return the loss, or the tensors it is made of"
            )

    def holds(self, p: Tensor) -> bool:
        """Whether ``p`` is a parameter that the model had at boost."""
        return id(p) in self._held

    def _remember(self) -> None:
        self._places = [
            (module, name, p)
            for module in self.unwrap().modules()
            for name, p in module._parameters.items()
            if p is not None
        ]
        self._held = {id(p) for _, _, p in self._places}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._is_local = self._is_local, True
        self._let_sync(False)
        if self._watch is not None:
            self._watch.no_sync_depth += 1
        try:
            yield
        finally:
            self._is_local = before
            self._let_sync(True)
            if self._watch is not None:
                self._watch.no_sync_depth -= 1

    def _let_sync(self, sync: bool) -> None:
        for unit in self._units:
            unit.set_requires_gradient_sync(sync, recurse=False)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load; each rank takes its part of values that are whole."""
        from colossalai.booster.plugin.fsdp_parameter import cut_like

        own: dict[str, Any] = dict(self.unwrap().named_parameters(remove_duplicate=False))
        cut = {
            name: cut_like(p, value)
            for name, value in state_dict.items()
            if hasattr(p := own.get(name, value), "placements")
            and isinstance(value, Tensor)
            and value.shape == p.shape
        }
        self.reshard()
        result = super().load_state_dict({**state_dict, **cut}, *args, **kwargs)
        self._remember()  # assign=True puts others in their places, which FSDP2 knows of
        return result

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if not ismethod(found) or hasattr(nn.Module, name):
            return found

        @wraps(found)
        def method(*args: Any, **kwargs: Any) -> Any:
            try:
                return found(*args, **kwargs)
            except RuntimeError as error:
                if MIXED not in str(error):
                    raise
                raise RuntimeError(
                    f"model.{name}(...) computes with weights that are cut: TorchFSDPPlugin gathers them for"
                    " model(...) only. Call"
                    f" torch.distributed.fsdp.register_fsdp_forward_method(model.unwrap(), {name!r}) once"
                    " after boost, or compute in forward"
                ) from error

        return method


class TorchFSDPOptimizer(OptimizerWrapper):
    """An optimizer of parameters that are ``DTensor``; it may be wrapped by a mixed precision already."""

    def __init__(self, optim: Optimizer, model: TorchFSDPModel) -> None:
        super().__init__(optim)
        self._model = model

    @property
    def averages_gradients(self) -> bool:
        return True

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        try:
            super().backward(loss, *args, **kwargs)
        except RuntimeError as error:
            if MIXED not in str(error):
                raise
            raise RuntimeError(
                "the loss computes with a weight that is cut, outside of the model's forward: TorchFSDPPlugin"
                " gathers weights for model(...) only. Compute in the forward, or take weight.full_tensor()"
                " in the place of weight, on every rank"
            ) from error

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            self._check_groups()
        except RuntimeError:
            del self.param_groups[-1]
            raise

    def step(self, *args: Any, **kwargs: Any) -> Any:
        if not self._model.gradients_are_local:
            self._model.check_reduced()
        self._model.reshard()  # what is gathered would not change with the parts
        self._model.check_parameters()
        self._check_groups()
        if self._model.gradients_are_local:
            raise local_gradients()
        self._model.compare_ranks("updates its weights")
        return self.optim.step(*args, **kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if self._model.gradients_are_local:
            raise RuntimeError(
                "optimizer.zero_grad() after passes under no_sync only: FSDP2 keeps their gradients whole,"
                " where zero_grad does not reach, and would add them to the next ones; let the last pass of"
                " each group run outside of no_sync"
            )
        super().zero_grad(*args, **kwargs)

    @torch.no_grad()
    def clip_grad_by_value(self, clip_value: float) -> None:
        check_clip_value(clip_value)
        self.unscale_grad()
        for p in self.parameters():
            if p.grad is not None:
                own_part(p.grad).clamp_(-clip_value, clip_value)

    def _check_groups(self) -> None:
        for p in self.parameters():
            if not self._model.holds(p):
                raise RuntimeError(
                    f"the optimizer got a parameter of shape {tuple(p.shape)} that was not in the model at"
                    " boost, so TorchFSDPPlugin neither cuts it nor averages its gradient; put it into the"
                    " model before boost"
                )
