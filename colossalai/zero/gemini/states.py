"""What is being done with a parameter, and which changes of that are possible."""

from __future__ import annotations

from enum import Enum


class TensorState(Enum):
    FREE = 0
    """Its values are not on the compute device."""
    COMPUTE = 1
    """A module computes with it, forward or backward."""
    HOLD = 2
    """Its values are there, nobody uses them now."""
    HOLD_AFTER_BWD = 3
    """Its gradient is done, and lies where the backward pass left it."""
    READY_FOR_REDUCE = 4
    """Its gradient lies in the gradient buffer of its chunk."""


_S = TensorState
STATE_TRANS = frozenset(
    {
        (_S.FREE, _S.HOLD),
        (_S.FREE, _S.COMPUTE),
        (_S.HOLD, _S.FREE),
        (_S.HOLD, _S.COMPUTE),
        (_S.COMPUTE, _S.HOLD),
        (_S.COMPUTE, _S.HOLD_AFTER_BWD),
        (_S.HOLD_AFTER_BWD, _S.COMPUTE),
        (_S.HOLD_AFTER_BWD, _S.READY_FOR_REDUCE),
        (_S.READY_FOR_REDUCE, _S.HOLD),
    }
)


def check_transition(name: str, old: TensorState, new: TensorState) -> None:
    if old is not new and (old, new) not in STATE_TRANS:
        allowed = ", ".join(sorted(b.name for a, b in STATE_TRANS if a is old))
        raise RuntimeError(
            f"parameter {name!r} cannot go from {old.name} to {new.name}; from {old.name} it can go to {allowed}"
        )
