"""What scripts do with an ordinary optimizer, and cannot do with one that holds
pieces in the place of parameters.

Each of these would find nothing where it looks, and go on without a word: a state of its own, empty, for a
weight; a step of pieces that have no gradients yet; a loss scale that sees no gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, MutableMapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from colossalai.zero.pieces import Piece


class StatesOfPieces(MutableMapping[Tensor, Any]):
    """The states of an optimizer, by its pieces.

    Asked for the state of a weight of the model, it says where to look.

    Args:
        written: whether what is written to it counts.
    """

    def __init__(self, states: MutableMapping[Tensor, Any], pieces: list[Piece], *, written: bool) -> None:
        self._states, self._weights = states, {id(piece.param) for piece in pieces}
        self._written = written

    def _checked(self, key: Any) -> Any:
        if id(key) in self._weights and key not in self._states:
            raise RuntimeError(
                f"optimizer.state of a weight of shape {tuple(key.shape)}: this optimizer holds a piece of"
                " it on each rank, and the states of the piece; optimizer.state_dict() on every rank gives"
                " the whole states, by the numbers of the parameters"
            )
        return key

    def __getitem__(self, key: Tensor) -> Any:
        return self._states[self._checked(key)]

    def __setitem__(self, key: Tensor, value: Any) -> None:
        self._check_written()
        self._states[self._checked(key)] = value

    def __delitem__(self, key: Tensor) -> None:
        self._check_written()
        del self._states[self._checked(key)]

    def _check_written(self) -> None:
        if not self._written:
            raise states_rest_elsewhere()

    def __contains__(self, key: object) -> bool:
        return self._checked(key) in self._states

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)


def states_rest_elsewhere() -> RuntimeError:
    return RuntimeError(
        "optimizer.state was written to, but under Gemini states rest with the chunks of their weights,"
        " where this does not reach them; optimizer.load_state_dict({**optimizer.state_dict(), 'state': {}})"
        " on every rank forgets all of them, and with other states in it changes them"
    )


class StepGuard:
    """A hook that refuses a step of the optimizer inside past ``owner``.

    It does not keep its owner alive, and a copy of the hooks takes it along.
    """

    def __init__(self, owner: weakref.ref[Any]) -> None:
        self._owner = owner

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        owner = self._owner()
        if owner is not None and owner.optim is optimizer and not owner._own_steps:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() past {type(owner).__name__}, which has put pieces into"
                " it whose gradients come in its own step; call step() of the optimizer that boost returned"
            )

    def __reduce__(self) -> Any:
        return _Nothing, ()


class _Nothing:
    def __call__(self, *_: Any) -> None:
        """A copy of the optimizer inside is an ordinary one."""
