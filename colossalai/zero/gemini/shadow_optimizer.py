"""A shadow of the user's optimizer, for updates on another thread than the script's.

Jobs step some parameters with the options of an earlier moment, while the script may read and change the
groups.  So they step *shadows*: parameters with the memory of the pieces, but gradients of their own, in
groups of their own.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai.kernel.optimizer.snapshot import TensorSnapshot
from colossalai.mesh._compat import multiply_all
from colossalai.nn.optimizer.base import MultiTensorOptimizer
from colossalai.zero.pieces import Piece

Options = Sequence[Mapping[str, Any]]  # of every group, without its parameters
HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def group_options(optim: Optimizer) -> list[dict[str, Any]]:
    """Copy the options of all groups: a scheduler may change them before a job runs."""
    return [
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        for group in optim.param_groups
    ]


def stateless_copy(optim: Optimizer) -> Optimizer:
    """Return a copy of ``optim`` without parameters, states and hooks."""
    copy = object.__new__(type(optim))
    # a scheduler may have put a `step` of its own there
    copy.__dict__.update({k: v for k, v in optim.__dict__.items() if k not in ("step", "_versions")})
    copy.state = defaultdict(dict)
    copy.__dict__.update({name: OrderedDict() for name in HOOKS})
    copy.param_groups = []
    return copy


class ShadowOptimizer:
    """Steps shadows of the pieces of ``optim``: parameters with the same memory, and their own gradients and
    groups.
    """

    def __init__(self, optim: Optimizer) -> None:
        self.optim, self.inner = optim, stateless_copy(optim)
        self._params: dict[Piece, nn.Parameter] = {}

    @property
    def state(self) -> Any:
        return self.inner.state

    def param(self, piece: Piece) -> nn.Parameter:
        """Return the shadow of ``piece``."""
        if piece not in self._params:
            self._params[piece] = nn.Parameter(piece.value.detach())
        return self._params[piece]

    def with_states(self, piece: Piece) -> nn.Parameter:
        """Return the shadow of ``piece``, with the states of the piece."""
        shadow = self.param(piece)
        self.state[shadow] = self.optim.state[piece.value]
        return shadow

    def show(self, piece: Piece, weight: Tensor) -> None:
        """Let ``piece`` and its shadow have their values in ``weight``."""
        piece.weight = piece.value.data = weight
        if piece in self._params:
            self._params[piece].data = weight

    def forget(self, piece: Piece) -> None:
        self.state.pop(self._params.pop(piece, piece.value), None)

    # Whether the masters, or tails, that an optimizer keeps belong to the weights as they are now

    def master_is_current(self, piece: Piece) -> bool:
        """Return whether only updates wrote to ``piece`` since its last update."""
        shadow, inner = self._params.get(piece), self.inner
        if shadow is None or not isinstance(inner, MultiTensorOptimizer):
            return False
        return inner.versions.get(shadow) == shadow._version

    def mark_current(self, value: nn.Parameter) -> None:
        """Note that the master of this shadow belongs to its weights as they are now."""
        if isinstance(self.inner, MultiTensorOptimizer):
            self.inner.versions[value] = value._version

    @contextmanager
    def keep_current(self, pieces: Iterable[Piece]) -> Iterator[None]:
        """Keep the masters of ``pieces`` current while a snapshot restores weights and masters together."""
        current = [piece for piece in pieces if self.master_is_current(piece)]
        yield
        for piece in current:
            self.mark_current(self._params[piece])

    # The step

    @torch.no_grad()
    def step(
        self,
        shadows: Sequence[tuple[int, nn.Parameter]],
        options: Options,
        factor: float,
        kept: TensorSnapshot | None = None,
    ) -> None:
        """Step ``shadows``, given with the numbers of their groups; gradients are multiplied by ``factor``.

        What was before goes to ``kept``, if the optimizer ``keeps``.
        """
        groups: dict[int, list[nn.Parameter]] = {}
        for number, shadow in shadows:
            groups.setdefault(number, []).append(shadow)
        inner: Any = self.inner
        inner.param_groups = [{**options[n], "params": values} for n, values in groups.items()]
        values = [shadow for _, shadow in shadows]
        ours = isinstance(inner, MultiTensorOptimizer)
        if ours and inner.divides and factor > 0:
            scale = {} if factor == 1.0 else {"div_scale": 1.0 / factor}
            inner.step_on(values, **scale, **({} if kept is None else {"kept": kept}))
            return
        assert kept is None
        if factor != 1.0:
            multiply_all([v.grad for v in values if v.grad is not None], torch.tensor(factor))
        if ours:
            inner.step_on(values)
        else:
            inner.step()

    @torch.no_grad()
    def step_part(self, parts: Sequence[tuple[int, nn.Parameter]], options: Options, factor: float) -> None:
        """Step shadows that live for this step only; the caller takes their states."""
        self.step(parts, options, factor)
        for _, shadow in parts:
            shadow.grad = None
            if isinstance(self.inner, MultiTensorOptimizer):
                self.inner.versions.pop(shadow, None)
