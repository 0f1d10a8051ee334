"""A second hold on the user's optimizer, for updates on another thread than the script's.

Jobs step some parameters with the options of an earlier moment, while the script may read and change the groups.  So they step *twins*:
parameters with the memory of the pieces, but gradients of their own, in groups of their own.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai.kernel.kept import Kept
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


def options_of(optim: Optimizer) -> list[dict[str, Any]]:
    """The options of all groups as they are now: a scheduler may change them before a job runs."""
    return [
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        for group in optim.param_groups
    ]


def second_hold(optim: Optimizer) -> Optimizer:
    """Another object for the same optimizer, with no parameters yet, no states and no hooks."""
    second = object.__new__(type(optim))
    # a scheduler may have put a `step` of its own there
    second.__dict__.update({k: v for k, v in optim.__dict__.items() if k not in ("step", "_versions")})
    second.state = defaultdict(dict)
    second.__dict__.update({name: OrderedDict() for name in HOOKS})
    second.param_groups = []
    return second


class Second:
    """Steps twins of pieces of ``optim``."""

    def __init__(self, optim: Optimizer) -> None:
        self.optim, self.hold = optim, second_hold(optim)
        self.twins: dict[Piece, nn.Parameter] = {}

    @property
    def state(self) -> Any:
        return self.hold.state

    def twin(self, piece: Piece) -> nn.Parameter:
        if piece not in self.twins:
            self.twins[piece] = nn.Parameter(piece.value.detach())
        return self.twins[piece]

    def with_states(self, piece: Piece) -> nn.Parameter:
        """The twin of ``piece``, with the states of the piece."""
        twin = self.twin(piece)
        self.state[twin] = self.optim.state[piece.value]
        return twin

    def show(self, piece: Piece, weight: Tensor) -> None:
        """The weights of ``piece`` are here now."""
        piece.weight = piece.value.data = weight
        if piece in self.twins:
            self.twins[piece].data = weight

    def forget(self, piece: Piece) -> None:
        self.state.pop(self.twins.pop(piece, piece.value), None)

    # Whether the digits that an optimizer keeps beside half-precision weights belong to the weights as they are

    def is_followed(self, piece: Piece) -> bool:
        """Nobody else wrote to ``piece`` since its last update."""
        twin, hold = self.twins.get(piece), self.hold
        if twin is None or not isinstance(hold, MultiTensorOptimizer):
            return False
        return hold.versions.get(twin) == twin._version

    def follows(self, value: nn.Parameter) -> None:
        """The digits of this twin are those of its weights."""
        if isinstance(self.hold, MultiTensorOptimizer):
            self.hold.versions[value] = value._version

    @contextmanager
    def steady(self, pieces: Iterable[Piece]) -> Iterator[None]:
        """Inside, we write weights together with their digits, so those of ``pieces`` stay with their weights."""
        followed = [piece for piece in pieces if self.is_followed(piece)]
        yield
        for piece in followed:
            self.follows(self.twins[piece])

    # The step

    @torch.no_grad()
    def step(
        self,
        twins: Sequence[tuple[int, nn.Parameter]],
        options: Options,
        factor: float,
        kept: Kept | None = None,
    ) -> None:
        """Step ``twins``, given with the numbers of their groups; gradients are multiplied by ``factor``.

        What was before goes to ``kept``, if the optimizer ``keeps``.
        """
        groups: dict[int, list[nn.Parameter]] = {}
        for number, twin in twins:
            groups.setdefault(number, []).append(twin)
        hold: Any = self.hold
        hold.param_groups = [{**options[n], "params": values} for n, values in groups.items()]
        values = [twin for _, twin in twins]
        ours = isinstance(hold, MultiTensorOptimizer)
        if ours and hold.divides and factor > 0:
            scale = {} if factor == 1.0 else {"div_scale": 1.0 / factor}
            hold.step_on(values, **scale, **({} if kept is None else {"kept": kept}))
            return
        assert kept is None
        if factor != 1.0:
            multiply_all([v.grad for v in values if v.grad is not None], torch.tensor(factor))
        if ours:
            hold.step_on(values)
        else:
            hold.step()

    @torch.no_grad()
    def step_part(self, parts: Sequence[tuple[int, nn.Parameter]], options: Options, factor: float) -> None:
        """``step`` for twins that live for this step only; their states are left to the caller."""
        self.step(parts, options, factor)
        for _, twin in parts:
            twin.grad = None
            if isinstance(self.hold, MultiTensorOptimizer):
                self.hold.versions.pop(twin, None)
