"""``GeminiOptimizer``: every chunk is updated where it rests, and the updates hide behind the passes of the model.

``step()`` does not wait.  Chunks that rest on the compute device are updated there at once.  For each of the others a job is given to a
thread: wait for the gradient, update weights and states on the host.  The next forward pass waits for a chunk's job only when it
needs the chunk, and jobs are done in the order in which it will.

With ``update_in_backward`` the job of a chunk begins as soon as its gradient has left the device, while the backward pass goes on; of several
that wait, the one that the next forward pass needs first is next.  This is for training without clipping and loss scale, since
both need all gradients before the first update; and for one backward pass in each step, or several of which all but the last are
under ``no_sync``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from colossalai.amp.naive_amp.grad_scaler import DynamicGradScaler
from colossalai.mesh import placement
from colossalai.mesh._compat import multiply_all
from colossalai.nn.optimizer import HybridAdam
from colossalai.nn.optimizer.base import MultiTensorOptimizer
from colossalai.zero.gemini.chunk import Chunk, Slot
from colossalai.zero.gemini.ddp import ZeroDDP
from colossalai.zero.gemini.grad_buffers import Taken
from colossalai.zero.gemini.grads import IN_FLIGHT
from colossalai.zero.gemini.placement import AutoPlacementPolicy
from colossalai.zero.gemini.resting import Resting, make_resting, share_on_disk, state_bytes
from colossalai.zero.gemini.stepping import check_params, is_large, like, make_pieces, second_hold
from colossalai.zero.gemini.tiers import UNLIMITED, Tier
from colossalai.zero.gemini.worker import nothing
from colossalai.zero.pieces import Piece
from colossalai.zero.sharded import ShardedOptimizer, stand_in

Options = list[dict[str, Any]]  # of every group, without its parameters


class GeminiOptimizer(ShardedOptimizer):
    """``optim`` over the chunks of ``module``.

    Args:
        optim: an optimizer of the parameters of the model that ``module`` was made of, built before or after.
        gpu_margin_mem_ratio: the share of what the first step leaves free of the compute tier that is given to chunks to rest
            there with their states; ``auto`` always takes all of it.
        initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis, max_scale: the loss scale, in fp16.
        clipping_norm: the largest norm of all gradients; 0 does not clip.
        update_in_backward: see the module.
    """

    def __init__(
        self,
        optim: Optimizer,
        module: ZeroDDP,
        gpu_margin_mem_ratio: float = 0.0,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        clipping_norm: float = 0.0,
        norm_type: float = 2.0,
        verbose: bool = False,
        *,
        update_in_backward: bool = False,
    ) -> None:
        _check_model(module)
        if not 0 <= gpu_margin_mem_ratio <= 1:
            raise ValueError(f"gpu_margin_mem_ratio is a share from 0 to 1, got {gpu_margin_mem_ratio!r}")
        self.model, self.chunks, self.manager = module, module.chunk_manager, module.gemini_manager
        self.margin = gpu_margin_mem_ratio
        scaler = None
        if module.dtype is torch.float16:
            scaler = DynamicGradScaler(
                initial_scale,
                growth_factor,
                backoff_factor,
                growth_interval,
                min_scale,
                max_scale,
                hysteresis,
                verbose,
            )
        if update_in_backward and (scaler is not None or clipping_norm):
            why = "fp16, whose loss scale" if scaler is not None else "clipping, which"
            raise ValueError(
                f"update_in_backward=True cannot be combined with {why} needs all gradients before the first update; train in"
                " bf16 or fp32 without clipping, or leave it out"
            )
        self.update_in_backward = update_in_backward
        check_params(optim, module)
        share = share_on_disk(optim, module)
        pieces, self._places = make_pieces(optim, module)
        super().__init__(
            optim,
            pieces,
            group=self.chunks.ranks.gather,
            scaler=scaler,
            max_norm=clipping_norm,
            norm_type=norm_type,
            mesh=module.mesh,
            report=verbose,
        )
        self._groups_of = self._group_numbers()
        self._twins: dict[Piece, nn.Parameter] = {}
        self._resting = make_resting(optim, module, self._pieces_of, self._twins, share)
        self._second = second_hold(optim)
        self._early: set[int] = set()  # chunks whose update began in the backward pass
        self._early_options: Options | None = None
        self._accounted: dict[int, int] = {}
        self._away: set[int] = set()  # chunks that rest on the disk on some rank: they do not move
        self._promoted = False
        self._stepping = False
        if scaler is not None or clipping_norm:
            module.gradients.norm_type = norm_type
        module.optimizer = self

    def _group_numbers(self) -> dict[int, list[tuple[int, Piece, Slot]]]:
        """By chunk: its pieces with the number of their group."""
        numbers = {id(p): n for n, group in enumerate(self.optim.param_groups) for p in group["params"]}
        found: dict[int, list[tuple[int, Piece, Slot]]] = {}
        for piece in self.pieces:
            chunk, slot = self._places[piece]
            found.setdefault(chunk.index, []).append((numbers[id(piece.value)], piece, slot))
        return found

    def _pieces_of(self, chunk: Chunk) -> list[Piece]:
        return [piece for _, piece, _ in self._groups_of.get(chunk.index, []) if not piece.is_empty]

    # Gradients

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self._check_not_unscaled()
        self.model.backward(self.scale_loss(loss), *args, **kwargs)

    def gradients_sent(self, chunk: Chunk) -> None:
        """The gradients of ``chunk`` are on their way home (called by the model, in the backward pass)."""
        gradients = self.model.gradients
        if not self.update_in_backward or not gradients.sync:
            return
        if self.manager.is_warmup() and gradients.host.most is None:
            return  # nobody knows yet which gradients come in parts; with few buffers there is no choice
        if chunk.index in self._early:
            raise RuntimeError(
                f"a second gradient came for {chunk.name} whose update had begun; update_in_backward=True is for one backward pass"
                " in each step: put all but the last under no_sync, or leave it out"
            )
        if chunk.home is self.chunks.compute or chunk.index in self.model.gradients.late:
            return
        state = self.model.gradients.of[chunk.index]
        if chunk.ranks.size > 1 and len(state.used) < len(self.model.gradients.trained[chunk.index]):
            return  # other ranks may have the missing ones: known at the end
        if self._early_options is None:
            self._early_options = self._options()
        self._early.add(chunk.index)
        self._submit(chunk, self._early_options, 1.0)

    def collect(self) -> None:
        # their norms are known: nobody looks at those that are still on their way to the host
        self.give_gradients(everywhere=self.is_scaled or self._max_norm > 0, wait=False)

    def give_gradients(self, everywhere: bool, wait: bool = True) -> None:
        """Let the pieces have their gradients: those on the compute device, or ``everywhere``, by default when they have arrived.

        The pieces of a chunk whose update has begun have none any more.
        """
        gradients = self.model.gradients
        gradients.resolve()
        if everywhere and wait:
            for index in gradients.of:
                gradients.settle(self.chunks.chunks[index])
        for piece, (chunk, slot) in self._places.items():
            if everywhere or chunk.home is self.chunks.compute:
                grad = gradients.piece(chunk, slot)
                if grad is not None and grad.dtype != piece.value.dtype:
                    gradients.settle(chunk)  # it is copied now
                piece.value.grad = None if grad is None else like(grad, piece)

    def measured(self, norm_type: float) -> list[Tensor]:
        gradients = self.model.gradients
        known: dict[tuple[str, ...], list[Tensor]] = {}
        rest: list[Tensor] = []
        for piece, (chunk, slot) in self._places.items():
            if piece.value.grad is None:
                continue
            if gradients.of[chunk.index].rows and norm_type != gradients.norm_type:
                gradients.norm_type, gradients.of[chunk.index].norms = norm_type, None
            norm = gradients.norm(chunk, slot) if norm_type == gradients.norm_type else None
            if norm is None:
                gradients.settle(chunk)
                rest.append(piece.value)
            else:
                known.setdefault(tuple(placement(piece.value).sharded), []).append(norm)
        gradients.norm_type = norm_type  # who asks for it asks again in the next step
        return rest + [stand_in(axes, torch.stack(norms)) for axes, norms in known.items()]

    def unscale_grad(self) -> None:
        """Called by whoever looks at all gradients."""
        before = self._unscaled
        super().unscale_grad()
        if not before and self._unscaled and not self._stepping:
            self.give_gradients(everywhere=True)

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        self._refuse_early("clip_grad_by_norm")
        return super().clip_grad_by_norm(max_norm, norm_type, error_if_nonfinite)

    def clip_grad_by_value(self, clip_value: float) -> None:
        self._refuse_early("clip_grad_by_value")
        if any(state.rows for state in self.model.gradients.of.values()):
            raise RuntimeError(
                "clip_grad_by_value needs all gradients on the host, but some wait on the disk; clip by norm, or give the host"
                " tier more capacity"
            )
        super().clip_grad_by_value(clip_value)
        for state in self.model.gradients.of.values():
            state.norms = None  # they were those of the gradients before
        for piece, (chunk, slot) in self._places.items():
            home = self.model.gradients.piece(chunk, slot)
            if home is not None and piece.value.grad is not None and home.dtype != piece.value.dtype:
                home.copy_(piece.value.grad.view(-1))  # what a master got is a copy

    def _refuse_early(self, who: str) -> None:
        if self._early:
            raise RuntimeError(
                f"{who} comes too late: with update_in_backward=True {len(self._early)} chunks have been updated in the backward"
                " pass; leave update_in_backward out"
            )

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        super().zero_grad(*args, **kwargs)
        self.model.zero_grad()

    def _has_grad(self) -> bool:
        return bool(self._early) or self.model.gradients.has_any()

    # The step

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self._stepping = True
        try:
            result = super().step(*args, **kwargs)
        finally:
            self._stepping = False
        self.manager.drop_all()
        if self.step_was_skipped:
            self.model.zero_grad()
        self._early.clear()
        self._early_options = None
        if self._resting is not None:
            self._resting.shelf.raise_failures()
        if not self._promoted and not self.manager.is_warmup():
            self._promoted = True
            self._agree_on_states()
            self._promote()
        return result

    def update(self, pieces: Sequence[Piece] | None = None, factor: float | Tensor | None = None) -> Any:
        if pieces is not None:
            return super().update(pieces, factor)
        gradients, options = self.model.gradients, self._options()
        hosted = [
            self.chunks.chunks[i]
            for i in gradients.of
            if self.chunks.chunks[i].home is not self.chunks.compute and gradients.of[i].is_begun
        ]
        for chunk in hosted:
            for _, piece, _ in self._groups_of.get(chunk.index, []):
                piece.value.grad = None  # set again by its job
        result = super().update(None, factor)  # what rests on the compute device
        if hosted:
            now = float(self._factor if factor is None else factor)
            for chunk in sorted(hosted, key=lambda c: self.manager.trace.first_use(c.index)):
                self._submit(chunk, options, now)
        for i in gradients.of:
            chunk = self.chunks.chunks[i]
            if chunk.home is self.chunks.compute:
                self._account(chunk)
                gradients.clear(chunk)
        for piece in self.pieces:
            if self._places[piece][0].home is self.chunks.compute:
                piece.value.grad = None
        return result

    def _options(self) -> Options:
        """The options of all groups as they are now: a scheduler may change them before a job runs."""
        return [
            {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
            for group in self.optim.param_groups
        ]

    def _submit(self, chunk: Chunk, options: Options, factor: float) -> None:
        taken = self.model.gradients.take(chunk)
        assert taken is not None
        self.manager.mark_stale(chunk)

        def work() -> None:
            self._update_chunk(chunk, taken, options, factor)

        priority = self.manager.trace.first_use(chunk.index)
        prepare = partial(self._resting.prepare, chunk) if self._resting is not None else nothing
        self.manager.worker.submit(chunk.index, priority, chunk.name, work, taken.is_here, prepare)

    @torch.no_grad()
    def _update_chunk(self, chunk: Chunk, taken: Taken, options: Options, factor: float) -> None:
        """The job: on the worker's thread."""
        shard = self.model.gradients.sum_up(chunk, taken)
        self.manager.timeline.note("update", chunk)
        parts = [
            (number, piece)
            for number, piece, slot in self._groups_of.get(chunk.index, [])
            if slot in taken.used and not piece.is_empty
        ]
        buffer = self._states_at_hand(chunk, [piece for _, piece in parts])
        groups: dict[int, list[nn.Parameter]] = {}
        for number, piece in parts:
            twin = self._twin(piece)
            twin.grad = like(piece.in_shard(shard), piece)
            groups.setdefault(number, []).append(twin)
        if parts:
            self._second.param_groups = [{**options[n], "params": twins} for n, twins in groups.items()]
            self._step_second([twin for twins in groups.values() for twin in twins], factor)
            for _, piece in parts:
                self._twins[piece].grad = None
                if not piece.is_shared:
                    piece.weight.copy_(piece.value)
        if buffer is not None:
            assert self._resting is not None
            self._resting.put(chunk, buffer)
        self._account(chunk)
        self.model.gradients.put(shard)
        self.manager.timeline.note("updated", chunk)

    def _states_at_hand(self, chunk: Chunk, pieces: Sequence[Piece]) -> Tensor | None:
        """Before an update: room for the states of ``pieces``, and a buffer with what rests on the disk."""
        resting = self._resting
        missing = sum(state_bytes(self.optim, p) for p in pieces if not self.optim.state.get(p.value))
        if resting is None or not resting.takes(chunk, missing, self._room_for_states()):
            self._account(chunk, missing if isinstance(self.optim, MultiTensorOptimizer) else 0)
            return None
        buffer = resting.bring(chunk)
        resting.fill(chunk, buffer, pieces)
        return buffer

    def _room_for_states(self) -> int:
        """Bytes of the host that nobody else will need."""
        return self.chunks.host_room() - self.model.gradients.host.missing_bytes

    def _twin(self, piece: Piece) -> nn.Parameter:
        """The same memory and states as the piece's value, but a gradient of its own: the script's thread looks at the value's."""
        if piece not in self._twins:
            self._twins[piece] = nn.Parameter(piece.value.detach())
        twin = self._twins[piece]
        self._second.state[twin] = self.optim.state[piece.value]
        return twin

    def _step_second(self, values: list[nn.Parameter], factor: float) -> None:
        second: Any = self._second
        ours = isinstance(second, MultiTensorOptimizer)
        if ours and second.divides and factor > 0:
            second.step_on(values, **({} if factor == 1.0 else {"div_scale": 1.0 / factor}))
            return
        if factor != 1.0:
            multiply_all([v.grad for v in values if v.grad is not None], torch.tensor(factor))
        if ours:
            second.step_on(values)
        else:
            second.step()

    def _account(self, chunk: Chunk, coming: int = 0) -> None:
        """Count the states of ``chunk`` where they lie, and those that are ``coming``; the shelf counts its own."""
        assert chunk.home is not None
        if self._resting is not None and self._resting.has(chunk):
            return
        now, before = self._state_bytes(chunk) + coming, self._accounted.get(chunk.index, 0)
        if now > before:
            chunk.home.take(now - before, f"optimizer states of {chunk.name}")
            self._accounted[chunk.index] = now

    def _agree_on_states(self) -> None:
        """Count the same on all ranks, the most of any: what is brought and let go must not differ."""
        ranks = self.chunks.ranks
        if self._resting is not None:
            self.settle()
            self._away = self._on_any_disk(self._resting)
        if ranks.size == 1:
            return
        self.settle()
        counts = [self._accounted.get(chunk.index, 0) for chunk in self.chunks.chunks]
        most = torch.tensor(counts, dtype=torch.int64, device=self.model.gradients.meeting)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=ranks.reduce)
        for chunk, before, now in zip(self.chunks.chunks, counts, most.tolist(), strict=True):
            assert chunk.home is not None
            if self._resting is not None and self._resting.has(chunk):
                continue
            chunk.home.take(now - before, f"optimizer states of {chunk.name}")
            self._accounted[chunk.index] = now

    def _on_any_disk(self, resting: Resting) -> set[int]:
        ranks = self.chunks.ranks
        flags = [int(resting.has(chunk)) for chunk in self.chunks.chunks]
        if ranks.size > 1:
            shared = torch.tensor(flags, dtype=torch.int32, device=self.model.gradients.meeting)
            dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=ranks.reduce)
            flags = shared.tolist()
        return {i for i, flag in enumerate(flags) if flag}

    def _state_bytes(self, chunk: Chunk) -> int:
        total = 0
        for _, piece, _ in self._groups_of.get(chunk.index, []):
            if piece.value in self.optim.state:
                total += sum(t.nbytes for t in self.optim.state[piece.value].values() if is_large(t))
            if not piece.is_shared:
                total += piece.value.nbytes
        return total

    def settle(self) -> None:
        self.manager.worker.wait_all()

    @torch.no_grad()
    def weights_loaded(self) -> None:
        """Weights were written at their homes: pieces that are copies, and no masters, take them."""
        for piece in self.pieces:
            if not piece.is_shared and not piece.is_empty and piece.value.dtype == piece.weight.dtype:
                piece.value.copy_(piece.weight)

    def _state_of(self, piece: Piece) -> dict[str, Any]:
        chunk = self._places[piece][0]
        if self._resting is not None and self._resting.has(chunk):
            return self._resting.portable(chunk, piece)
        return super()._state_of(piece)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self._resting is None:
            return
        for chunk in self.chunks.chunks:
            if chunk.home is self.chunks.compute:
                continue
            self._resting.forget_states(chunk)
            self.chunks.host.give(self._accounted.pop(chunk.index, 0))
            if self._resting.takes(chunk, self._state_bytes(chunk), self._room_for_states()):
                self._resting.put(chunk, self._resting.bring(chunk))
            self._account(chunk)

    def follow_changes(self) -> None:
        """Nothing: whoever changes weights at their home changes the pieces too (``write``)."""

    @torch.no_grad()
    def write(self, slot: Slot, part: Tensor) -> bool:
        """Give the piece of ``slot`` other values, where there is one."""
        for _, piece, own in self._groups_of.get(self.chunks.get_chunk(slot.param).index, []):
            if own is slot and not piece.is_empty:
                chunk = self._places[piece][0]
                resting = self._resting if self.chunks.is_on_disk(chunk) else None
                buffer = None if resting is None else resting.bring(chunk)
                piece.value.copy_(part.view(piece.value.shape))
                if not piece.is_shared:
                    piece.weight.copy_(part.view(piece.weight.shape))
                if piece in self._twins:
                    increment_version(
                        self._twins[piece]
                    )  # our optimizers look whether a parameter has changed
                if resting is not None and buffer is not None:
                    resting.put(chunk, buffer)
                return True
        return False

    # Homes on the compute device

    def _promote(self) -> None:
        """After the first step it is known what activations need: let as many chunks as fit rest on the compute device."""
        share = 1.0 if self.manager.policy.measures else self.margin
        if not share or self.manager.policy.rests_on_compute:
            return
        self.settle()
        budget = self._budget(share)
        moved = False
        order = sorted(
            (c for c in self.chunks.chunks if c.home is self.chunks.host and c.index not in self._away),
            key=lambda c: (self.manager.trace.first_use(c.index), c.index),
        )
        everything = sum(self._cost(c) for c in order)
        if everything > budget:
            budget -= self._window()
        for chunk in order:
            if self._cost(chunk) > budget:
                break
            budget -= self._cost(chunk)
            self.move_home(chunk, self.chunks.compute)
            moved = True
        if moved:
            self.model._hooks.refresh()

    def _cost(self, chunk: Chunk) -> int:
        """Bytes that ``chunk`` takes of the compute tier when it rests there: weights, gradients, states."""
        trained = chunk.trained
        return chunk.shard_nbytes * (2 if trained else 1) + self._accounted.get(chunk.index, 0)

    def _window(self) -> int:
        """Bytes for the chunks that come and go."""
        largest = max(c.nbytes for c in self.chunks.chunks)
        return (self.manager.prefetch + 2 + IN_FLIGHT + 1) * largest

    def _budget(self, share: float) -> int:
        compute = self.chunks.compute
        total = compute.limit
        if self.chunks.device.type == "cuda":
            # a script may allow itself a part of the device only
            share_of = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
            memory = torch.cuda.get_device_properties(self.chunks.device).total_memory
            memory = int(memory * share_of(self.chunks.device))
            usable = int(memory * AutoPlacementPolicy._steady_cuda_cap_ratio)
            total = min(total, usable - self.manager.memstats().non_model)
        budget = int((total - compute.used) * share)
        if self.chunks.ranks.size > 1:  # ranks gather the same chunks
            budget = min(budget, UNLIMITED)
            number = torch.tensor([budget], dtype=torch.int64, device=self.model.gradients.meeting)
            dist.all_reduce(number, op=dist.ReduceOp.MIN, group=self.chunks.ranks.reduce)
            budget = int(number.item()) - self._window()
        return budget

    @torch.no_grad()
    def move_home(self, chunk: Chunk, tier: Tier) -> None:
        """Let ``chunk`` rest in ``tier``, with its states."""
        old = chunk.home
        assert old is not None
        states = self._accounted.get(chunk.index, 0)
        self.manager.mark_stale(chunk)
        self.chunks.move_chunk(chunk, tier)
        tier.take(states, f"optimizer states of {chunk.name}")
        old.give(states)
        for _, piece, _ in self._groups_of.get(chunk.index, []):
            shared, known = piece.is_shared, self._is_followed(piece)
            self._second.state.pop(self._twins.pop(piece, piece.value), None)
            piece.weight = piece.in_shard(chunk.shard) if not piece.is_empty else chunk.shard[:0]
            piece.value.data = piece.weight if shared else piece.value.data.to(tier.device)
            state = self.optim.state.get(piece.value, {})
            for name, value in state.items():
                if is_large(value):
                    state[name] = value.to(tier.device)
            if known:
                self.optim.versions[piece.value] = piece.value._version  # type: ignore[attr-defined]

    def _is_followed(self, piece: Piece) -> bool:
        """Whether the digits that the optimizer keeps beside ``piece`` belong to the weights as they are: nobody else wrote to them."""
        twin, second = self._twins.get(piece), self._second
        if twin is None or not isinstance(second, MultiTensorOptimizer):
            return False
        return second.versions.get(twin) == twin._version


class ZeroOptimizer(GeminiOptimizer):
    """The documented name."""


class GeminiAdamOptimizer(GeminiOptimizer):
    """``HybridAdam`` over a Gemini model; ``defaults`` are arguments of ``HybridAdam`` and of ``GeminiOptimizer``."""

    def __init__(self, model: ZeroDDP, **defaults: Any) -> None:
        _check_model(model)
        own = {name: defaults.pop(name) for name in list(defaults) if name in _OWN}
        super().__init__(HybridAdam(model.parameters(), **defaults), model, **own)


_OWN = (
    "gpu_margin_mem_ratio",
    "initial_scale",
    "min_scale",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "hysteresis",
    "max_scale",
    "clipping_norm",
    "norm_type",
    "verbose",
    "update_in_backward",
)


def _check_model(module: Any) -> None:
    if not isinstance(module, ZeroDDP):
        raise TypeError(
            f"a Gemini optimizer needs the model that GeminiDDP made, got {type(module).__name__}; wrap the model first"
        )
