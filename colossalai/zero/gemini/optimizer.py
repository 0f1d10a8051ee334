"""``GeminiOptimizer``: every chunk is updated where it rests, and the updates overlap with the passes of the
model.

``step()`` does not wait.  Chunks that rest on the compute device are updated there at once.  For each of the
others a job is given to a thread: wait for the gradients, update weights and states on the host.  The next
forward pass waits for a chunk's job only when it needs the chunk, and jobs are done in the order in which it
will.

With ``update_in_backward`` the job of a chunk begins as soon as its gradients have left the device, while the
backward pass goes on; of several that wait, the one that the next forward pass needs first is next.  Clipping
and a loss scale need all gradients before the first update; with them, updates in the backward pass are
speculative (``colossalai.zero.gemini.speculative``).  ``update_in_backward=True`` promises one backward pass
in each step (or several of which all but the last are under ``no_sync``) and nothing between it and the step.
``update_in_backward=None`` promises nothing: all updates are speculative, where they can be rolled back and
the host has memory for snapshots.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai.amp.loss_scale import LossScaleOptions
from colossalai.interface.optimizer import local_gradients
from colossalai.mesh import set_own_grad
from colossalai.mesh._compat import norms_of
from colossalai.mesh.gradient_norm import counts_here
from colossalai.nn.optimizer import HybridAdam
from colossalai.utils.parallel import raised_together
from colossalai.zero.absent_tensors import KeptGradients
from colossalai.zero.gemini.access_order import NEVER
from colossalai.zero.gemini.chunk import Chunk, ParamSlot
from colossalai.zero.gemini.chunk_filling import check_shares
from colossalai.zero.gemini.ddp import ZeroDDP
from colossalai.zero.gemini.disk_states import install_states, make_disk_states, share_on_disk
from colossalai.zero.gemini.host_updates import HostUpdates
from colossalai.zero.gemini.optimizer_states import ChunkPieces, StateBytes, check_params, like, make_pieces
from colossalai.zero.gemini.promotion import Promotion
from colossalai.zero.gemini.shadow_optimizer import Options, ShadowOptimizer, group_options
from colossalai.zero.gemini.speculative import UNDO_RATIO, SpeculativeUpdates, can_roll_back
from colossalai.zero.pieces import Piece
from colossalai.zero.sharded import Lies, ShardedOptimizer, lies_over, stand_in
from colossalai.zero.states import cut_state


def _used_up(who: str) -> str:
    return (
        f"{who} after a step without optimizer.zero_grad(): plain PyTorch would use the gradients of that"
        " step again, but Gemini has given their memory away in it; call optimizer.zero_grad() in every"
        " iteration"
    )


ONE_PASS = (
    "update_in_backward=True is for one backward pass in each step, which uses no weights after their"
    " gradients have come: put all passes but the last under no_sync, or leave it out"
)


class GeminiOptimizer(ShardedOptimizer):
    """Steps ``optim`` over the chunks of ``module``.

    Args:
        optim: an optimizer of the parameters of the model that ``module`` was made of, built before or after.
        gpu_margin_mem_ratio: the share of what the first step leaves free of the compute tier that is given
            to chunks to rest there with their states; ``auto`` always takes all of it.
        initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis, max_scale: the
            loss scale, in fp16.
        clipping_norm: the largest norm of all gradients; 0 does not clip.
        update_in_backward: see the module.  With None updates begin in the backward pass where they can be
            rolled back; with True they always do, with False they wait for ``step()``.
        undo_ratio: the share of the weights and states on the host that snapshots may take, to roll back
            speculative updates.  With 0 none is speculative.
    """

    takes_written_states = False

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
        update_in_backward: bool | None = None,
        undo_ratio: float = UNDO_RATIO,
    ) -> None:
        _check_model(module)
        check_shares(gpu_margin_mem_ratio=gpu_margin_mem_ratio, undo_ratio=undo_ratio)
        self.model, self.chunks, self.manager = module, module.chunk_manager, module.gemini_manager
        in_fp16 = module.dtype is torch.float16
        scaler = LossScaleOptions.of(locals()).scaler(verbose) if in_fp16 else None
        check_params(optim, module)
        share = share_on_disk(optim, module)
        # why a step may be clipped or skipped, so that its updates may have to be rolled back
        rejects = "a loss scale" if scaler is not None else "clipping" if clipping_norm > 0 else None
        early = _early_updates(optim, module, update_in_backward, undo_ratio, rejects)
        self.update_in_backward = early is not EarlyUpdates.NONE
        self._places = make_pieces(optim, module)
        super().__init__(
            optim,
            list(self._places),
            group=self.chunks.ranks.gather,
            scaler=scaler,
            max_norm=clipping_norm,
            norm_type=norm_type,
            mesh=module.mesh,
            report=verbose,
        )
        self._numbers = {piece: number for number, piece in self._numbered.items()}
        self._build_parts(share, gpu_margin_mem_ratio)
        self._speculative = (
            SpeculativeUpdates(self._updates, undo_ratio, heeds_host=update_in_backward is None)
            if early is EarlyUpdates.SPECULATIVE
            else None
        )
        self._by_hand = False  # the script has looked at the gradients of this step
        self._expects_acceptance = True  # that the next step will neither be clipped nor overflow
        self._early: set[int] = set()  # chunks whose update began in the backward pass
        self._early_options: Options | None = None
        self._promoted = self._has_updated = False
        self._stepping = False
        self._used_up = False  # the last step has used up gradients that were not cleared since
        self._used: set[ParamSlot] = set()
        self._early_used: set[ParamSlot] = set()  # whose gradients updates in this backward pass have taken
        self._zeros: set[ParamSlot] = set()  # that zero_grad(set_to_none=False) has left zeros for
        if scaler is not None or clipping_norm:
            module.gradients.memory.norm_type = norm_type
        module.attach(self)

    def _build_parts(self, share: float | None, margin: float) -> None:
        """Make what updates chunks on the host and on the disk (``share`` of states), and promotes them."""
        module, optim = self.model, self.optim
        self._chunk_pieces = pieces = ChunkPieces(optim, self.pieces, self._places)
        self._shadow = shadow = ShadowOptimizer(optim)
        self._disk = make_disk_states(module, shadow, pieces, share)
        self._state_bytes = state_bytes = StateBytes(module, optim, pieces, self._disk)
        self._updates = HostUpdates(module, optim, pieces, shadow, self._disk, state_bytes)
        self._promotion = Promotion(module, pieces, shadow, state_bytes, margin)

    # Gradients

    def kept_gradients(self) -> KeptGradients:
        return self.model.shown.kept

    def keeps_gradient(self, param: Tensor) -> bool:
        return self.model.shown.keeps_gradient(param)

    def why_no_gradient(self, param: Tensor) -> str:
        return self.model.shown.why_no_gradient(param)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self._check_not_unscaled()
        self.model.backward(self.scale_loss(loss), *args, **kwargs)

    def gradients_reduced(self, chunk: Chunk) -> None:
        """Update ``chunk`` in the backward pass, if that is wanted and safe: its gradients are on their way
        home.
        """
        gradients = self.model.gradients
        if not self.update_in_backward or not gradients.sync:
            return
        if self.manager.is_warmup() and gradients.memory.host.most is None:
            return  # it is not known yet which gradients come in parts; with few buffers there is no choice
        if chunk.index in self._early:
            raise RuntimeError(f"a second gradient came for {chunk.name} whose update had begun; {ONE_PASS}")
        if self.manager.trace.complete and self.manager.trace.next_use(chunk.index) != NEVER:
            return  # the backward pass needs its weights again
        if chunk.home is self.chunks.compute or chunk.index in gradients.late or gradients.tied.has(chunk):
            return
        state = gradients.of[chunk.index]
        if self.chunks.ranks.size > 1 and len(state.used) < len(state.trained):
            return  # other ranks may have the missing ones: known at the end
        if self._speculative is not None and not self._expects_acceptance:
            return
        if self._early_options is None:  # the first of this step
            self._early_options = group_options(self.optim)
            self.refresh_masters()
        if self._speculative is not None:
            self._speculative.begin(chunk, self._early_options, self._unclipped_factor())
            return
        self._early.add(chunk.index)
        self._early_used.update(state.used)
        self._updates.submit(chunk, self._early_options, 1.0)

    def _unclipped_factor(self) -> float:
        """Return the factor of gradients that are not clipped."""
        factor = torch.tensor(1.0) if self._max_norm > 0 else 1.0
        return float(self.scaler.inv_scale * factor if self.is_scaled else factor)

    def before_fetch(self, chunk: Chunk) -> None:
        """Let the backward pass read the weights of the forward pass: roll back, or refuse, an update of
        ``chunk``.
        """
        if self._speculative is not None:
            self._speculative.roll_back_chunk(chunk)
        elif chunk.index in self._early and self.model.is_in_backward:
            raise RuntimeError(
                f"the backward pass needs {chunk.name} again, whose update had begun; {ONE_PASS}"
            )

    def roll_back(self) -> None:
        """Roll back speculative updates: the script reads weights or gradients before the step, or drops
        them.
        """
        if self._speculative is not None and self._speculative.has_pending:
            self._speculative.roll_back()
            self._early_options = None  # they may be changed now

    def bring_gradients(self) -> None:
        self.model.gradients.take_tied()
        # their norms are known: gradients that are still on their way to the host are not read
        self.give_gradients(everywhere=self.is_scaled or self._max_norm > 0, wait=False)

    def give_gradients(self, everywhere: bool, wait: bool = True) -> None:
        """Give the pieces their gradients: those on the compute device, or ``everywhere``; ``wait`` until
        they have arrived.

        The pieces of a chunk whose update has begun have none any more.
        """
        gradients = self.model.gradients
        gradients.resolve()
        if everywhere and wait:
            for state in gradients.of.values():
                state.settle()
        for piece, (chunk, slot) in self._places.items():
            if everywhere or chunk.home is self.chunks.compute:
                state = gradients.of[chunk.index]
                grad = state.piece(slot)
                if grad is not None and grad.dtype != piece.value.dtype:
                    state.settle()  # it is copied now
                set_own_grad(piece.value, None if grad is None else like(grad, piece))

    def measured(self, norm_type: float) -> list[Tensor]:
        """Return norms in the order of the pieces, wherever chunks rest: so their sum is the same to the last
        bit.
        """
        gradients, memory = self.model.gradients, self.model.gradients.memory
        norms: dict[Piece, Tensor] = {}
        unknown: dict[Piece, Tensor] = {}
        for piece, (chunk, slot) in self._places.items():
            grad = piece.value.grad
            if grad is None or not grad.numel():
                continue
            state = gradients.of[chunk.index]
            if state.is_on_disk and norm_type != memory.norm_type:
                memory.norm_type = norm_type
                state.forget_norms()
            norm = state.norm(slot) if norm_type == memory.norm_type else None
            if norm is None:
                state.settle()
                unknown[piece] = grad
            else:
                norms[piece] = norm
        memory.norm_type = norm_type  # who asks for it asks again in the next step
        norms.update(zip(unknown, norms_of(list(unknown.values()), norm_type), strict=True))
        is_on_cpu = all(norm.device.type == "cpu" for norm in norms.values())
        alike: dict[Lies, list[Tensor]] = {}
        for piece in self._places:
            if piece in norms and counts_here(piece.value):
                norm = norms[piece] if is_on_cpu else norms[piece].to(self.chunks.device)
                alike.setdefault(lies_over(piece), []).append(norm)
        return [stand_in(where, torch.stack(own)) for where, own in alike.items()]

    def unscale_grad(self) -> None:
        """Unscale all gradients; the script calls it to read or to clip them."""
        before = self._unscaled
        if not self._stepping:
            self.roll_back()  # the caller may write to them
            self._by_hand = True
        super().unscale_grad()
        if not before and self._unscaled and not self._stepping:
            self.give_gradients(everywhere=True)

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        self._refuse_early("clip_grad_by_norm")
        if not self._stepping:
            self.manager.begin_step()
        return super().clip_grad_by_norm(max_norm, norm_type, error_if_nonfinite)

    def clip_grad_by_value(self, clip_value: float) -> None:
        self._refuse_early("clip_grad_by_value")
        if any(state.is_on_disk for state in self.model.gradients.of.values()):
            raise RuntimeError(
                "clip_grad_by_value needs all gradients on the host, but some wait on the disk; clip by norm,"
                " or give the host tier more capacity"
            )
        super().clip_grad_by_value(clip_value)
        for state in self.model.gradients.of.values():
            state.forget_norms()  # they were those of the gradients before
        for piece, (chunk, slot) in self._places.items():
            home = self.model.gradients.of[chunk.index].piece(slot)
            if home is not None and piece.value.grad is not None and home.dtype != piece.value.dtype:
                home.copy_(piece.value.grad.view(-1))  # what a master got is a copy

    def _refuse_early(self, who: str) -> None:
        # not by what this rank has updated: with branches the others may have updated other chunks, and would
        # go on
        waits = not self.update_in_backward or self._speculative is not None
        if not waits and any(chunk.home is not self.chunks.compute for chunk in self.chunks.chunks):
            raise RuntimeError(
                f"{who} comes too late: with update_in_backward=True chunks are updated in the backward pass;"
                " give the norm to the optimizer (clipping_norm, max_norm of GeminiPlugin, clip_grad of a"
                " zero section), or leave update_in_backward out"
            )

    def used_up(self, param: nn.Parameter) -> bool:
        """Whether the last step has used a gradient of ``param`` up, which plain PyTorch would still show."""
        return self._used_up and self.chunks.get_slot(param) in self._used

    def gradients_cleared(self) -> None:
        """Note that the model has dropped the gradients of the last step."""
        self._used_up = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        used = self._now_used()
        self._zeros = set() if set_to_none else self._zeros | self._used | used
        self._used = set()
        self._early_used.clear()
        self.model.forget_gradients()
        super().zero_grad()

    def _now_used(self) -> set[ParamSlot]:
        """Return the slots that have got gradients since they were cleared, on any rank."""
        self.model.gradients.resolve()
        return self._early_used.union(*(state.slots() for state in self.model.gradients.of.values()))

    def _check_zeros(self, used: set[ParamSlot]) -> None:
        """Refuse a step that leaves out what the serial optimizer would step with a gradient of zeros."""
        left = sorted(slot.name for slot in self._zeros - used)
        if left:
            raise RuntimeError(
                f"zero_grad(set_to_none=False) has left zeros as the gradient of {left[0]}, which no rank has"
                " used since: plain PyTorch still moves it, by momentum and weight decay, and Gemini steps"
                " only what has a gradient; call zero_grad(), as is the default, or use LowLevelZeroPlugin"
            )

    def _has_grad(self) -> bool:
        gradients = self.model.gradients
        return bool(self._early) or gradients.has_any() or gradients.tied.has_any()

    # The step

    def check_cleared(self) -> None:
        """Refuse a backward pass after a step without ``zero_grad``: the gradients that it would add to are
        used up.
        """
        if self._used_up:
            raise RuntimeError(_used_up("a backward pass"))

    @contextmanager
    def stepping(self) -> Iterator[None]:
        self.manager.begin_step()
        has_grad, used = self._has_grad(), self._now_used()
        self._check_zeros(used)
        if self._used_up and not has_grad:
            raise RuntimeError(_used_up("optimizer.step()"))
        if any(state.local is not None for state in self.model.gradients.of.values()):
            raise local_gradients()
        if self._may_promote_before_update():
            self.manager.evict_all()
            self._promote()
        self._stepping = True
        try:
            with super().stepping():
                yield
        finally:
            self._stepping = False
        self.manager.evict_all()
        if self.step_was_skipped:
            self._expects_acceptance = False
            self.zero_grad()
        else:
            self._used_up, self._used = has_grad, used
        self._early.clear()
        self._early_used.clear()
        self._early_options = None
        self._by_hand = False
        if self._disk is not None:
            self._disk.shelf.raise_failures()
        if not self.step_was_skipped:
            self._promote()

    def _may_promote_before_update(self) -> bool:
        """Whether chunks can move with their gradients, before the first update makes their states on the
        host; the same on all ranks.
        """
        begins_early = self.update_in_backward and self.model.gradients.memory.host.most is not None
        return not self._by_hand and self._disk is None and not begins_early

    def _promote(self) -> None:
        """Move chunks to the compute device, once, when a backward pass has shown what it leaves free."""
        if not self._promoted and not self.manager.is_warmup():
            self._promoted = True
            self._state_bytes.agree()
            self._promotion.promote()

    def update(self, pieces: Sequence[Piece] | None = None, factor: float | Tensor | None = None) -> Any:
        if pieces is not None:
            return super().update(pieces, factor)
        # in the first update the states of a stage are made, for which there may be no room
        with raised_together("could not be updated", not self._has_updated):
            result = self._update_all(factor)
        self._has_updated = True
        return result

    def _update_all(self, factor: float | Tensor | None) -> Any:
        gradients, options = self.model.gradients, group_options(self.optim)
        hosted = [
            self.chunks.chunks[i]
            for i in gradients.of
            if self.chunks.chunks[i].home is not self.chunks.compute and gradients.of[i].is_begun
        ]
        for chunk in hosted:
            for _, piece, _ in self._chunk_pieces.of(chunk):
                set_own_grad(piece.value, None)  # its job has one for its shadow
        result = super().update(None, factor)  # what rests on the compute device
        if hosted:
            now = float(self._factor if factor is None else factor)
            self._expects_acceptance = now == self._unclipped_factor() and not self._by_hand
            tried = self._speculative.decide(options, now) if self._speculative is not None else set()
            for chunk in sorted(hosted, key=lambda c: self.manager.trace.first_use(c.index)):
                if chunk.index not in tried:
                    self._updates.submit(chunk, options, now)
        # states that were made now take room that was left to chunks that come and go
        self.manager.evict_all()
        for i in gradients.of:
            chunk = self.chunks.chunks[i]
            if chunk.home is self.chunks.compute:
                self._state_bytes.count(chunk)
                gradients.of[i].clear()
        for piece in self.pieces:
            if self._places[piece][0].home is self.chunks.compute:
                set_own_grad(piece.value, None)
        return result

    def rests_here(self, piece: Piece) -> bool:
        return self._places[piece][0].home is self.chunks.compute

    def settle(self) -> None:
        self.roll_back()
        self.manager.worker.wait_all()

    def load_states(self, state_dict: dict[str, Any], states: dict[int, Any]) -> None:
        """Load states chunk by chunk, each to where its states rest, so that no tier exceeds its capacity."""
        strangers = {n: state for n, state in states.items() if n not in self._numbered}
        for piece in self.pieces:
            self.optim.state.pop(piece.value, None)
        self._forget_states()
        super().load_states(state_dict, strangers)
        for chunk in self.chunks.chunks:
            self._place_states(chunk, states)

    def load_other_state(self, state: dict[str, Any]) -> None:
        """Take over the states that a checkpoint has put into the optimizer."""
        super().load_other_state(state)
        self._forget_states()
        for chunk in self.chunks.chunks:
            self._place_states(chunk, {})

    def _forget_states(self) -> None:
        if self._disk is not None:
            self._disk.forget()
        for chunk in self.chunks.chunks:
            self._state_bytes.forget(chunk)

    def _place_states(self, chunk: Chunk, states: dict[int, Any]) -> None:
        """Move loaded states of ``chunk``, and those of ``states``, to where they rest."""
        rests = self._disk if chunk.home is not self.chunks.compute else None
        weights = None if rests is None else rests.read_weights(chunk)
        pieces = self._chunk_pieces.pieces(chunk)
        install_states(
            self.optim, {p: cut for p in pieces if (cut := cut_state(states.get(self._numbers[p], {}), p))}
        )
        if rests is not None:
            loaded = [p for p in pieces if self.optim.state.get(p.value)]
            rests.place(chunk, loaded, self._state_bytes.room())
            rests.store_states(loaded)
            rests.write_weights(chunk, weights)
        self._state_bytes.count(chunk)

    @torch.no_grad()
    def write(self, slot: ParamSlot, part: Tensor) -> bool:
        """Write ``part`` to the weights of ``slot`` at their home, if the optimizer has a piece of them."""
        chunk = self.chunks.get_chunk(slot.param)
        piece = next((m.piece for m in self._chunk_pieces.of(chunk) if m.slot is slot), None)
        if piece is None or piece.is_empty:
            return False
        buffer = None if self._disk is None else self._disk.read_weights(chunk)
        piece.weight.copy_(part.view(piece.weight.shape))
        piece.seen = -1
        if self._disk is not None:
            self._disk.write_weights(chunk, buffer)
        return True


class ZeroOptimizer(GeminiOptimizer):
    """The documented name of ``GeminiOptimizer``."""


class GeminiAdamOptimizer(GeminiOptimizer):
    """Steps ``HybridAdam`` over a Gemini model; ``defaults`` are arguments of ``HybridAdam`` and
    ``GeminiOptimizer``.
    """

    def __init__(self, model: ZeroDDP, **defaults: Any) -> None:
        _check_model(model)
        own = {name: defaults.pop(name) for name in list(defaults) if name in _OWN}
        super().__init__(HybridAdam(model.parameters(), **defaults), model, **own)


_OWN = [name for name in inspect.signature(GeminiOptimizer).parameters if name not in ("optim", "module")]


class EarlyUpdates(Enum):
    """How chunks are updated in the backward pass."""

    NONE = "all updates wait for the step"
    FINAL = "updates stand, as the script has promised that nothing comes between them and the step"
    SPECULATIVE = "the step accepts updates, or rolls them back"


def _early_updates(
    optim: Optimizer, module: ZeroDDP, asked: bool | None, undo_ratio: float, rejects: str | None
) -> EarlyUpdates:
    """Choose how chunks are updated in the backward pass, from ``update_in_backward`` as ``asked``.

    ``rejects`` names what may reject the updates of a step, if anything does.
    """
    if not isinstance(asked, bool | None):
        raise ValueError(f"update_in_backward is True, False or None, got {asked!r}")
    if asked is False or (undo_ratio == 0 and (asked is None or rejects is not None)):
        return EarlyUpdates.NONE
    if asked and rejects is None:
        return EarlyUpdates.FINAL
    why_not = _why_not_speculative(optim, module)
    if why_not is None:
        return EarlyUpdates.SPECULATIVE
    if asked is None:
        return EarlyUpdates.NONE
    raise ValueError(f"update_in_backward=True with {rejects} {why_not}, or leave update_in_backward out")


def _why_not_speculative(optim: Optimizer, module: ZeroDDP) -> str | None:
    """Return why speculative updates could not be rolled back, and what to do; None where they can be."""
    if module.chunk_manager.shelf is not None:
        return (
            "keeps on the host what it may have to take back, for which there is no room beside a disk tier;"
            " leave the disk tier out"
        )
    if not can_roll_back(optim):
        return f"may have to take updates back, and those of {type(optim).__name__} cannot be; use HybridAdam"
    return None


def _check_model(module: Any) -> None:
    if not isinstance(module, ZeroDDP):
        raise TypeError(
            f"a Gemini optimizer needs the model that GeminiDDP made, got {type(module).__name__}; wrap the"
            " model first"
        )
