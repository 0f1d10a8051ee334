"""Optimizers whose states may rest on a disk, and pass through memory slot by slot while they are updated.

All states of a parameter go: its moments, and the float32 weights of a parameter in half precision
(``master``, or ``tail``). Only parameters on the CPU take part.  Their states are in slots (see ``offload``),
of which ``nvme_offload_fraction``, by bytes, rest on the disk; ``optimizer.state`` has only the number of
steps, and ``state_dict`` reads the rest.

A state that was loaded is in ``optimizer.state`` at first, as in any optimizer, and is then filled into
slots: at once, or, for a parameter in half precision, in the next step, because its float32 weights must be
compared with the parameter then.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from colossalai._numeric import HALF_DTYPES
from colossalai.kernel import _compat
from colossalai.kernel.optimizer.lists import covers_its_memory, row
from colossalai.kernel.optimizer.split import join
from colossalai.nn.optimizer.base import KernelBatch, MultiTensorOptimizer, local, wide
from colossalai.nn.optimizer.nvme_pipeline import Extent, Fields, Offload, Part, StateSlot, begin
from colossalai.nn.optimizer.refresh_masters import current_master
from colossalai.utils.disk import aligned_empty

Groups = list[tuple[dict[str, Any], list[Tensor]]]


@dataclass(frozen=True)
class ParameterUpdate:
    """One parameter in one step."""

    group: dict[str, Any]
    step: int
    weight: Tensor  # all elements in the order of memory
    grad: Tensor
    has_changed: bool  # by others, since the last step, as torch has counted
    compares: bool  # whether to look for changes that torch has not counted


class NVMeOptimizer(MultiTensorOptimizer):
    """An optimizer that works element by element, with
    ``nvme_offload_fraction`` (0 to 1) of its states on a disk.

    ``offload_dir`` is the directory for it; None is the one for temporary files.
    """

    _offload_options: tuple[float, str | os.PathLike[str] | None] = (0.0, None)

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        nvme_offload_fraction: float = 0.0,
        offload_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(params, defaults)
        self.offload_states(nvme_offload_fraction, offload_dir)

    def offload_states(self, fraction: float, directory: str | os.PathLike[str] | None) -> None:
        """Say, before the first step, where states rest."""
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
            raise ValueError(
                f"{type(self).__name__} needs an nvme_offload_fraction between 0 (all states in memory) and"
                f" 1 (all on the disk); got {fraction!r}"
            )
        self._offload_options = (float(fraction), directory)
        if fraction:
            self.__dict__["_offloaded"] = Offload(*self._offload_options)

    def give_up_offload(self) -> tuple[float, str | os.PathLike[str] | None]:
        """Bring all states to memory, for a plan that decides where they rest; returns the options."""
        options, offload = self._offload_options, self._offload
        if offload is not None:
            for parameter in list(offload.slots):
                self.state[parameter] = self.portable_state(parameter)
        self._offload_options = (0.0, None)
        self.__dict__.pop("_offloaded", None)
        return options

    @property
    def _offload(self) -> Offload | None:
        """None if all states stay in memory."""
        if self._offload_options[0] and "_offloaded" not in self.__dict__:  # a copy, or unpickled
            self.__dict__["_offloaded"] = Offload(*self._offload_options)
        return self.__dict__.get("_offloaded")

    def _update(self, groups: Groups) -> None:
        if (offload := self._offload) is None:
            super()._update(groups)
            return
        mine = [
            (group, [p for p in ps if p.grad is not None and self._takes_part(p)]) for group, ps in groups
        ]
        chosen = set(chain.from_iterable(ps for _, ps in mine))
        for parameter in chosen:  # all of them, before the first is changed
            self.check(parameter)
        self._place(offload, mine)
        super()._update([(group, [p for p in ps if p not in chosen]) for group, ps in groups])
        jobs = self._jobs(mine)
        try:
            offload.run(offload.slots_of(jobs), lambda slot, buffer: self._update_slot(slot, buffer, jobs))
        finally:
            self._release(offload, chosen)
            self.versions.update({p: p._version for p in chosen if p.dtype in HALF_DTYPES})

    def _takes_part(self, parameter: Tensor) -> bool:
        """Whether the states of this parameter are in slots."""
        part = local(parameter)
        fits = part.device.type == "cpu" and part.numel() > 0 and covers_its_memory(part)
        before = None if self._offload is None else self._offload.strides.get(parameter)
        if before is not None and not (fits and _order(part, before) == _order(part, part.stride())):
            raise RuntimeError(
                f"the parameter of shape {tuple(parameter.shape)} was on the CPU with strides {before} when"
                f" its states were offloaded; now it is on {parameter.device} with strides {part.stride()}."
                " Save a state_dict, and load it into a new optimizer"
            )
        return fits

    def _place(self, offload: Offload, groups: Groups) -> None:
        """Slots for the parameters that have none yet."""
        new: dict[tuple[int, torch.dtype], tuple[list[Tensor], Fields]] = {}
        for number, (group, parameters) in enumerate(groups):
            for p in parameters:
                if p not in offload.slots:
                    self._check_moved(group, p)
                    new.setdefault((number, p.dtype), ([], self._fields(group, p)))[0].append(p)
        if not new:
            return
        everything = sum(
            p.numel() * sum(dtype.itemsize for _, dtype in self._fields(group, p))
            for group in self.param_groups
            for p in group["params"]
            if p.requires_grad and p.device.type == "cpu"
        )
        offload.place(new.values(), everything)
        for parameter in chain.from_iterable(ps for ps, _ in new.values()):
            self.state[parameter].setdefault("step", torch.tensor(0.0))

    def _check_moved(self, group: dict[str, Any], parameter: Tensor) -> None:
        """Wrappers that put other parameters in the place of the model's move
        ``optimizer.state``, but not slots.
        """
        state = self.state.get(parameter, {})
        if state.get("step") and not all(name in state for name in self.state_names(group)):
            raise RuntimeError(
                f"the states of the parameter of shape {tuple(parameter.shape)} are on the disk for another"
                " one, which it replaced. Wrap the optimizer before its first step, or load its state_dict"
                " after wrapping it"
            )

    def _fields(self, group: dict[str, Any], parameter: Tensor) -> Fields:
        fields = [(name, wide(parameter)) for name in self.state_names(group)]
        if parameter.dtype in HALF_DTYPES:
            extra = self.extra(parameter)
            fields.append((extra, torch.int16 if extra == "tail" else torch.float32))
        return fields

    def _jobs(self, groups: Groups) -> dict[Tensor, ParameterUpdate]:
        """What is to be done; numbers of steps go up by one."""
        owners = [(group, p) for group, parameters in groups for p in parameters]
        if not owners:
            return {}
        counters = [self.state[p]["step"] for _, p in owners]
        _compat.add_(counters, 1)
        jobs = {}
        for (group, p), step in zip(owners, torch.stack(counters).tolist(), strict=True):
            assert p.grad is not None
            weight, grad = local(p.detach()), local(p.grad)
            if grad.stride() != weight.stride():
                grad = torch.empty_like(weight, dtype=grad.dtype).copy_(grad)
            has_changed = p.dtype in HALF_DTYPES and self.versions.get(p) != p._version
            compares = self._compares and p.dtype in HALF_DTYPES and self.extra(p) == "master"
            jobs[p] = ParameterUpdate(group, int(step), row(weight), row(grad), has_changed, compares)
        return jobs

    def _update_slot(self, slot: StateSlot, buffer: Tensor, jobs: dict[Tensor, ParameterUpdate]) -> None:
        batches: dict[tuple[int, int, torch.dtype], tuple[dict[str, Any], KernelBatch]] = {}
        for extent, states in slot.states(buffer):
            if not slot.is_filled:
                self._fill(extent, states)
            job = jobs.get(extent.parameter)
            if job is None:
                continue
            weight, grad = extent.of(job.weight), extent.of(job.grad)
            if "master" in states:
                self.uncounted.refresh_(
                    states["master"], weight, has_changed=job.has_changed, compares=job.compares
                )
            elif job.has_changed and slot.is_filled:  # a tail that was just filled is in line already
                states["tail"].zero_()
            key = (id(job.group), job.step, grad.dtype)
            _, batch = batches.setdefault(key, (job.group, KernelBatch(job.step)))
            batch.add(weight, grad, states.get("master"), states.get("tail"))
            for name in self.state_names(job.group):
                batch.states[name].append(states[name])
        for group, batch in batches.values():
            self.update(batch, group)

    def _fill(self, extent: Extent, states: dict[str, Tensor]) -> None:
        """The states of an extent before its first step here: loaded ones, or start values."""
        known = {
            name: extent.of(row(local(value)))
            for name, value in self.state[extent.parameter].items()
            if name != "step"
        }
        begin(states, known, extent.of(row(local(extent.parameter.detach()))))

    def _release(self, offload: Offload, parameters: Iterable[Tensor]) -> None:
        """Drop loaded states that are in slots now."""
        for parameter in parameters:
            if all(slot.is_filled for slot in offload.slots[parameter]):
                self.state[parameter] = {"step": self.state[parameter]["step"]}

    def portable_state(self, parameter: Tensor) -> dict[str, Any]:
        offload = self._offload
        if offload is None or parameter not in offload.slots:
            return super().portable_state(parameter)
        part, strides = local(parameter.detach()), offload.strides[parameter]
        weight = row(_laid_out(part, strides, part.dtype).copy_(part))
        is_stale = self.is_stale(parameter)

        def master(slot: StateSlot, extent: Extent, states: dict[str, Tensor]) -> None:
            if "tail" in states:  # which means nothing without the weight
                tail = states.pop("tail")
                lost = slot.is_filled and is_stale
                states["master"] = join(extent.of(weight), torch.zeros_like(tail) if lost else tail)
            elif "master" in states:
                states["master"] = current_master(states["master"], extent.of(weight))

        found: dict[str, Any] = {"step": self.state[parameter]["step"]}
        for name, values in offload.read(parameter, partial(self._look_at, offload), master).items():
            laid_out = _laid_out(part, strides, values.dtype)
            row(laid_out).copy_(values)
            found[name] = torch.empty_like(parameter, dtype=values.dtype, requires_grad=False)
            local(found[name]).copy_(laid_out)
        return found

    def lazy_state(self, parameter: Tensor) -> dict[str, Any]:
        offload = self._offload
        if offload is None or parameter not in offload.slots:
            return super().lazy_state(parameter)
        group = next(g for g in self.param_groups if any(p is parameter for p in g["params"]))
        names = [*self.state_names(group), *(["master"] if parameter.dtype in HALF_DTYPES else [])]

        def read(name: str) -> Tensor:
            return local(self.portable_state(parameter)[name])

        return {"step": self.state[parameter]["step"], **{name: partial(read, name) for name in names}}

    def _look_at(self, offload: Offload, slot: StateSlot) -> list[Part]:
        if slot.is_filled:
            return list(slot.states(offload.pipeline.look_at(slot)))
        found = list(slot.states(aligned_empty(slot.nbytes)))
        for extent, states in found:
            self._fill(extent, states)
        return found

    def master(self, parameter: Tensor) -> Tensor:
        if (
            self._offload is None
            or parameter not in self._offload.slots
            or parameter.dtype not in HALF_DTYPES
        ):
            return super().master(parameter)
        return local(self.portable_state(parameter)["master"])

    def state_dict(self) -> dict[str, Any]:
        """torch's, with the states that are on the disk, and float32 weights of
        half-precision parameters as ``master``.
        """
        found = super().state_dict()
        if self._offload is not None:
            self._offload.pipeline.look_away()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.states_replaced()

    def states_replaced(self) -> None:
        super().states_replaced()
        if (offload := self._offload) is None:
            return
        offload.clear()
        loaded = [
            (
                group,
                [
                    p
                    for p in group["params"]
                    if self.state.get(p) and p.dtype not in HALF_DTYPES and self._takes_part(p)
                ],
            )
            for group in self.param_groups
        ]
        self._place(offload, loaded)
        parameters = list(chain.from_iterable(ps for _, ps in loaded))
        offload.run(offload.slots_of(parameters), lambda slot, buffer: self._update_slot(slot, buffer, {}))
        self._release(offload, parameters)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_offload_options": self._offload_options}


def _order(tensor: Tensor, strides: tuple[int, ...]) -> list[int]:
    """What ``strides`` say about the order of the elements of ``tensor``."""
    return [stride for stride, size in zip(strides, tensor.shape, strict=True) if size != 1]


def _laid_out(tensor: Tensor, strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An empty tensor on the CPU with the shape of ``tensor``."""
    return torch.empty_strided(tensor.shape, strides, dtype=dtype, device="cpu")
