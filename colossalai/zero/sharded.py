"""The sharded optimizer: the user's optimizer, whose groups hold this rank's
pieces in the place of the parameters.

Groups with options of their own, frozen and unused parameters, schedulers and hooks are then the user's
optimizer's own affair.  This module adds what concerns all pieces together: the norm of all gradients, the
loss scale, skipped steps, and a state that looks like the serial optimizer's.

Our own optimizers take half-precision pieces and keep the missing digits in their states.  To another
optimizer a piece is its fp32 master, whose rounded values are copied to the weights after each step.

How gradients come to the pieces and updated pieces to the other ranks is up to
subclasses: ``bring_gradients`` and ``publish``.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from colossalai._numeric import HALF_DTYPES
from colossalai.amp._compat import changes, copy_all
from colossalai.amp.naive_amp.grad_scaler import BaseGradScaler, ConstantGradScaler
from colossalai.amp.scaled_optimizer import SCALER_KEY, ScaledOptimizer
from colossalai.checkpoint_io.files.io import PIECE
from colossalai.interface.holding import MASTERS_KEY, Holding
from colossalai.interface.hooks import tell_of_local_hooks
from colossalai.interface.optimizer import check_clip_value
from colossalai.mesh import Layout, Mesh, grad_norm, own_grad, place, placement, set_own_grad
from colossalai.mesh._compat import multiply_all
from colossalai.mesh.gradient_norm import SLICED_OVER, check_clipping, clip_factor
from colossalai.nn.optimizer.base import MultiTensorOptimizer
from colossalai.nn.optimizer.large_batch import FusedLAMB
from colossalai.nn.optimizer.refresh_masters import UncountedWrites
from colossalai.utils.optimizer_state import check_state
from colossalai.zero.absent_tensors import KeptGradients, PieceGradients, why_no_gradient
from colossalai.zero.pieces import Piece
from colossalai.zero.refusals import StatesOfPieces, StepGuard, states_rest_elsewhere
from colossalai.zero.states import cut_state, sliced_states, whole


def needs_masters(optimizer: Optimizer, dtype: torch.dtype) -> bool:
    """Whether pieces of weights of ``dtype`` are stepped as fp32 masters.

    Our optimizers keep the digits themselves.
    """
    return dtype in HALF_DTYPES and not isinstance(optimizer, MultiTensorOptimizer)


class ShardedOptimizer(ScaledOptimizer):
    """``optim`` with ``pieces`` in the place of their parameters.

    Args:
        optim: the user's optimizer; parameters of its groups that have no piece (frozen ones) stay as they
            are.
        pieces: one for each parameter to train, on every rank, also if it is empty.
        group: the ranks that own the other pieces, or of experts other experts; None for a single one.
        scaler: the loss scale; None to scale nothing.
        max_norm: the largest norm of all gradients, in every step; 0 does not clip.
        norm_type: which norm that is.
        mesh: the ranks that the parameters may be cut over beside, by default those of a launched job.
        report: warn of skipped steps.
    """

    takes_written_states = True  # what is written to ``state`` is where steps look for it
    kept: KeptGradients
    piece_gradients: PieceGradients
    _own_steps = 0
    scaler: BaseGradScaler

    def __init__(
        self,
        optim: Optimizer,
        pieces: Sequence[Piece],
        *,
        group: dist.ProcessGroup | None = None,
        scaler: BaseGradScaler | None = None,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        mesh: Mesh | None = None,
        report: bool = True,
    ) -> None:
        check_clipping(max_norm, norm_type)
        self.group = group if group is not None and dist.get_world_size(group) > 1 else None
        super().__init__(optim, [] if self.group is None else [self.group], report, mesh)
        self.scaler = scaler or ConstantGradScaler(1)
        self.grad_norm: Tensor | None = None
        self._max_norm, self._norm_type = max_norm, norm_type
        self._factor: float | Tensor = 1.0  # what the gradients of the pieces must still be multiplied by
        self._norms: dict[float, Tensor] = {}  # of the gradients as they are, by their kind
        self._uncounted = UncountedWrites()
        self._adopt(pieces)
        self.refuse_steps_of_others()
        self.keep_gradients()
        if self.group is not None:
            tell_of_local_hooks(optim, [piece.param for piece in self.pieces], type(self).__name__)
        # ranks that hold nothing of the parameters of some axes must still take part in their norm
        home = self.pieces[0].value.device if self.pieces else torch.device("cpu")
        lie = dict.fromkeys(lies_over(piece) for piece in self.pieces)
        self._witnesses = [stand_in(where, torch.empty(0, device=home)) for where in lie]

    def _adopt(self, pieces: Sequence[Piece]) -> None:
        by_param = {id(piece.param): piece for piece in pieces}
        self.pieces: list[Piece] = []
        self._numbered: dict[int, Piece] = {}
        number = 0
        for group in self.optim.param_groups:
            for place_, param in enumerate(group["params"]):
                piece = by_param.pop(id(param), None)
                if piece is not None:
                    group["params"][place_] = piece.value
                    setattr(piece.value, PIECE, piece)
                    setattr(piece.value, SLICED_OVER, piece.group)
                    self.pieces.append(piece)
                    self._numbered[number] = piece
                    if state := cut_state(self.optim.state.pop(param, {}), piece):
                        self.optim.state[piece.value] = state
                number += 1
        assert not by_param, "a piece of a parameter that is in no group"

    # Gradients, see the note in ``colossalai.zero.absent_tensors``

    def keep_gradients(self) -> None:
        """Let the gradients of parameters and pieces be seen as this plan has them, from now on."""
        self.kept = self.kept_gradients()
        params: dict[Tensor, Tensor] = {piece.value: piece.param for piece in self.pieces}
        self.piece_gradients = PieceGradients(self, self.kept, params)

    def kept_gradients(self) -> KeptGradients:
        """The guard of the parameters of the model."""
        kept = KeptGradients(self, [piece.param for piece in self.pieces])
        kept.guard()
        return kept

    def keeps_gradient(self, param: Tensor) -> bool:
        return own_grad(param) is not None

    def shown_gradient(self, param: Tensor) -> Tensor | None:
        return None

    def why_no_gradient(self, param: Tensor) -> str:
        return why_no_gradient(f"a parameter of shape {tuple(param.shape)}", type(self).__name__)

    # Steps

    def refuse_steps_of_others(self) -> None:
        """A step of the optimizer inside, past this one, is an error from now on."""
        self.optim.register_step_pre_hook(StepGuard(weakref.ref(self)))

    @contextmanager
    def own_step(self) -> Iterator[None]:
        """Inside, the optimizer inside may step."""
        self._own_steps += 1
        try:
            yield
        finally:
            self._own_steps -= 1

    @property
    def state(self) -> Any:
        return StatesOfPieces(self.optim.state, self.pieces, written=self.takes_written_states)

    @state.setter
    def state(self, value: Any) -> None:
        if not self.takes_written_states:
            raise states_rest_elsewhere()
        self.optim.state = value

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # what torch's GradScaler asks first
        raise RuntimeError(
            f"torch.amp.GradScaler finds no gradients in {type(self).__name__}, which has them in pieces;"
            " leave it out, and let the plugin scale the loss: precision='fp16'"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} holds pieces that belong to its job, so it cannot be copied or pickled;"
            " use state_dict() and load_state_dict(), or booster.save_optimizer"
        )

    # Loss scale

    @property
    def is_scaled(self) -> bool:
        return not (isinstance(self.scaler, ConstantGradScaler) and self.scaler.scale == 1)

    @property
    def skips_steps(self) -> bool:
        return self.is_scaled

    @property
    def averages_gradients(self) -> bool:
        return True

    @property
    def loss_scale(self) -> float:
        return self.scaler.scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        self._scaled = True
        return loss.float() * self.scaler.scale if self.is_scaled else loss

    def update_scale(self, overflowed: bool) -> None:
        self.scaler.update(overflowed)
        self.piece_gradients.close()
        self._factor = 1.0
        self._norms.clear()

    # Norm and clipping

    def gradients(self) -> list[Tensor]:
        return [piece.value.grad for piece in self.pieces if piece.value.grad is not None]

    def global_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the gradients of the whole model, unscaled and as far as they are clipped already."""
        if norm_type not in self._norms:
            held = self.measured(norm_type)
            self._norms[norm_type] = grad_norm([*held, *self._witnesses], self.mesh, norm_type)
        return self._norms[norm_type] * self._factor

    def measured(self, norm_type: float) -> list[Tensor]:
        """Tensors whose gradients have the norm of this rank's pieces: the
        pieces, unless a plan knows their norms already.
        """
        return [piece.value for piece in self.pieces if piece.value.grad is not None]

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        check_clipping(max_norm, norm_type)
        self.unscale_grad()
        norm = self.global_norm(norm_type)
        self._factor = self._factor * clip_factor(norm, max_norm, error_if_nonfinite)
        return norm

    @torch.no_grad()
    def clip_grad_by_value(self, clip_value: float) -> None:
        check_clip_value(clip_value)
        self.unscale_grad()
        _multiply(self.gradients(), self._factor)
        for grad in self.gradients():
            grad.clamp_(-clip_value, clip_value)
        self._factor = 1.0
        self._norms.clear()

    # The parts of a step, see ``ScaledOptimizer.step``

    @contextmanager
    def stepping(self) -> Iterator[None]:
        with self.own_step():
            yield

    def collect(self) -> None:
        self.kept.check()
        self.piece_gradients.open()
        self.bring_gradients()
        self._factor, self.grad_norm = 1.0, None
        self._norms.clear()

    def bring_gradients(self) -> None:
        """Let every piece have its gradient, averaged over the ranks.

        Pieces of unused parameters keep None.
        """

    def unscale(self) -> bool:
        if not self.is_scaled:
            return False
        self._factor = self.scaler.inv_scale
        # a norm is finite if all gradients are, and it is taken over all ranks
        self.grad_norm = self.global_norm(self._norm_type)
        return not math.isfinite(self.grad_norm.item())

    def clip(self) -> None:
        if self._max_norm > 0:
            self.grad_norm = self.clip_grad_by_norm(self._max_norm, self._norm_type)
        if isinstance(self.optim, FusedLAMB) and self.optim.defaults["max_grad_norm"]:
            self.optim.known_norm = self.global_norm()

    def update(self, pieces: Sequence[Piece] | None = None, factor: float | Tensor | None = None) -> Any:
        """Let the user's optimizer step all pieces that have a gradient, or
        ``pieces`` alone, and write their weights.

        Gradients are multiplied by ``factor``, by default what unscaling and clipping left to do
        (``pending_factor``).  A plan that updates part by part calls ``unscale_grad``, clips, and calls
        ``refresh_masters`` before the first.
        """
        inner: Any = self.optim
        factor = self._factor if factor is None else factor
        some = self.pieces if pieces is None else pieces
        options = {}
        on_host = not isinstance(factor, Tensor) or factor.device.type == "cpu"
        if isinstance(inner, MultiTensorOptimizer) and inner.divides and on_host and float(factor) > 0:
            options = {} if float(factor) == 1.0 else {"div_scale": 1.0 / float(factor)}
        else:
            _multiply([p.value.grad for p in some if p.value.grad is not None], factor)
        if pieces is None:
            with self.own_step():
                result = inner.step(**options)
        elif isinstance(inner, MultiTensorOptimizer):
            result = inner.step_on([piece.value for piece in pieces], **options)
        else:
            with self.own_step(), _only(inner, {id(piece.value) for piece in pieces}):
                result = inner.step()
        self.write_weights(some)
        return result

    @property
    def pending_factor(self) -> float | Tensor:
        """What the gradients of the pieces must be multiplied by in the step:
        loss scale and clipping, once.
        """
        return self._factor

    @torch.no_grad()
    def write_weights(self, pieces: Sequence[Piece]) -> None:
        """Round masters to the weights of the model, and copy what was stepped on the host."""
        apart = [p for p in pieces if p.value.grad is not None and not p.is_shared]
        same = [p for p in apart if p.value.device == p.weight.device]
        if same:
            copy_all([p.weight for p in same], [p.value.detach() for p in same])
        for piece in apart:
            if piece.value.device != piece.weight.device:
                piece.weight.copy_(piece.value.detach(), non_blocking=True)

    @torch.no_grad()
    def refresh_masters(self, *, is_step: bool = False) -> None:
        compares = self._uncounted.is_due() if is_step else True
        for piece in self.pieces:
            now = changes(piece.param)
            has_changed, piece.seen = now != piece.seen, now
            if not has_changed and not compares:
                continue
            if not piece.is_shared:
                looks = compares and self.rests_here(piece)
                self._uncounted.refresh_(piece.value, piece.weight, has_changed=has_changed, compares=looks)
            elif has_changed and not piece.is_empty:
                increment_version(piece.value)  # the optimizer looks whether its parameter has changed

    def rests_here(self, piece: Piece) -> bool:
        """Whether the states of ``piece`` are where the user's optimizer has them."""
        return True

    def weights_loaded(self) -> None:
        super().weights_loaded()
        for piece in self.pieces:
            piece.seen = -1

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Drop all gradients, those of the model's parameters too."""
        for piece in self.pieces:
            set_own_grad(piece.param, None)
        self.kept.forget()
        self.piece_gradients.open()
        super().zero_grad(set_to_none=True)
        self.piece_gradients.close()

    def trained_parameters(self) -> list[Tensor]:
        return [piece.param for piece in self.pieces if piece.param.requires_grad]

    def _has_grad(self) -> bool:
        return any(p.value.grad is not None or own_grad(p.param) is not None for p in self.pieces)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise RuntimeError(
            f"{type(self).__name__} has cut its parameters into pieces, so it takes no further group; add it"
            " to the optimizer before"
        )

    # Checkpoints

    def settle(self) -> None:
        """Finish what is under way before states are read or replaced."""

    def holdings(self) -> list[Holding]:
        self.settle()
        self.refresh_masters()
        pieces = {id(piece.value): piece for piece in self.pieces}
        return [pieces[id(p)].holding if id(p) in pieces else Holding(p, p) for p in self.parameters()]

    def sharded_state_dict(self) -> dict[str, Any]:
        """The state of the serial optimizer, with a ``SlicedTensor`` for every
        tensor that lies on several ranks.
        """
        self.settle()
        self.refresh_masters()
        found: dict[str, Any] = {"state": sliced_states(self._numbered, self._state_of, self.group)}
        found["param_groups"] = self._serial_groups()
        masters = {n: p for n, p in self._numbered.items() if needs_masters(self.unwrap(), p.param.dtype)}
        if masters:
            sliced = sliced_states(masters, lambda piece: {MASTERS_KEY: piece.value.detach()}, self.group)
            found[MASTERS_KEY] = {number: entry[MASTERS_KEY] for number, entry in sliced.items()}
        if self.is_scaled:
            found[SCALER_KEY] = self.scaler.state_dict()
        return found

    def _serial_groups(self) -> Any:
        # our own optimizers would put their states together for it
        ours = isinstance(self.optim, MultiTensorOptimizer)
        state = Optimizer.state_dict(self.optim) if ours else self.optim.state_dict()
        return state["param_groups"]

    def _state_of(self, piece: Piece) -> dict[str, Any]:
        inner = self.optim
        if piece.value not in inner.state:
            return {}
        if isinstance(inner, MultiTensorOptimizer):
            return inner.portable_state(piece.value)
        return dict(inner.state[piece.value])

    def state_dict(self) -> dict[str, Any]:
        """The state of the serial optimizer, whole, on the CPU of every rank; every rank must ask."""
        return whole(self.sharded_state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the serial optimizer, or of this one at any number of ranks."""
        self.settle()
        state_dict = dict(state_dict)
        check_state(self.optim, state_dict)  # before anything is changed
        masters = state_dict.pop(MASTERS_KEY, {})
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        places = dict(zip(numbers, range(len(numbers)), strict=True))
        # a scale that is not used here is not missed
        scaler: dict[str, Any] = {} if self.is_scaled else {SCALER_KEY: {}}
        groups = _renumbered(state_dict["param_groups"])
        states = {places[n]: saved for n, saved in state_dict.get("state", {}).items()}
        self.load_states({**state_dict, **scaler, "param_groups": groups}, states)
        self._load_masters({places[int(n)]: value for n, value in masters.items() if int(n) in places})

    def load_states(self, state_dict: dict[str, Any], states: dict[int, Any]) -> None:
        """Load ``state_dict`` with ``states`` of the serial optimizer, by the
        numbers of the parameters here.
        """
        cut = {n: cut_state(s, self._numbered[n]) if n in self._numbered else s for n, s in states.items()}
        kept = {n: state for n, state in cut.items() if state or not states[n]}
        super().load_state_dict({**state_dict, "state": kept})

    @torch.no_grad()
    def _load_masters(self, masters: dict[int, Tensor]) -> None:
        for number, piece in self._numbered.items():
            if number in masters and needs_masters(self.unwrap(), piece.param.dtype) and not piece.is_empty:
                piece.value.copy_(piece.fit(masters[number]))
        self.weights_loaded()  # the weights themselves may be loaded before or after


def _renumbered(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups of a saved state, with their parameters numbered in order."""
    numbers = count()
    return [{**group, "params": [next(numbers) for _ in group["params"]]} for group in groups]


def _multiply(grads: Sequence[Tensor], factor: float | Tensor) -> None:
    if grads and not (isinstance(factor, float) and factor == 1.0):
        with torch.no_grad():
            multiply_all(grads, torch.as_tensor(factor, device=grads[0].device))


Lies = tuple[tuple[str, ...], dist.ProcessGroup | None]


def lies_over(piece: Piece) -> Lies:
    """The axes whose ranks hold other parts of the parameter of ``piece``, and the group whose ranks hold
    other slices of this part.
    """
    return tuple(placement(piece.value).sharded), getattr(piece.value, SLICED_OVER)


def stand_in(where: Lies, norms: Tensor) -> Tensor:
    """A tensor for pieces that lie alike: its gradient, ``norms``, has their norm."""
    axes, group = where
    made = nn.Parameter(torch.empty_like(norms))
    setattr(made, SLICED_OVER, group)
    if axes:
        place(made, Layout((axes,)), (norms.numel(),))
    made.grad = norms
    return made


@contextmanager
def _only(optimizer: Optimizer, wanted: set[int]) -> Iterator[None]:
    """Inside, the groups of ``optimizer`` hold the wanted parameters alone."""
    before = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in wanted]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, before, strict=True):
            group["params"] = params
