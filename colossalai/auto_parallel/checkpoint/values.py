"""Finds out whether values decide what a step computes, which a play on the meta device does not have.

The step is played twice, with every value taken for 0 and for 1: where both plays are the same, what was read
decides nothing, such as a loss that is logged.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable

from colossalai.auto_parallel.checkpoint.states import StatesError
from colossalai.auto_parallel.checkpoint.timeline import StepTimeline, TrainingStep, line_of


def _needs_values(error: Exception) -> bool:
    """Whether an operation on the meta device has raised ``error``, because the shape of its result depends
    on values; not a check of the model's own code.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, NotImplementedError):
        return isinstance(error, NotImplementedError)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return "/torch/" in last.filename or "raise " not in (last.line or "")


class WaysOfStep:
    """The plays of one step, by what values were taken for.

    Raises what the play did raise, if it read no value and it is not for want of values.
    """

    def __init__(self, step: TrainingStep, play: Callable[[], StepTimeline]) -> None:
        self._step, self._play = step, play
        self._found: dict[int, StepTimeline] = {}
        self._errors: dict[int, Exception] = {}
        self._reads: list[str] = []
        self._try(0)
        if self._reads:
            known, step.most_reads = step.most_reads, 10 * step.reads.total() + 100
            self._try(1)
            step.most_reads = known
        if 0 not in self._found and not self._reads and not isinstance(self._errors[0], RuntimeError):
            raise self._errors[0]
        step.read_as = 0

    def _try(self, value: int) -> None:
        self._step.read_as = value
        try:
            self._found[value] = self._play()
        except StatesError:
            raise
        except Exception as error:
            self._errors[value] = error
        self._reads += [read for read in self._step.reads if read not in self._reads]

    @property
    def first(self) -> StepTimeline:
        """The play with 0."""
        return self._found[0]

    @property
    def are_known(self) -> bool:
        """Whether the step can be played with both values."""
        return len(self._found) == 2

    @property
    def values_decide(self) -> bool:
        """Whether there is more than one way, or none without values."""
        if 0 not in self._found:
            return True
        if 1 in self._errors:  # else it is a check that refuses bad values
            return _needs_values(self._errors[1])
        return 1 in self._found and not self._is_alike() and not self._is_alike(again=True)

    def _is_alike(self, *, again: bool = False) -> bool:
        """Whether both plays are the same; the first of all may differ by what only a first one does."""
        if again:
            self._try(0)
        one, other = self._found[0], self._found[1]
        return one.calls == other.calls and one.pieces == other.pieces

    @property
    def larger(self) -> StepTimeline:
        """The play that needs more, which all later ones are then like; raises if there is none."""
        if not self._found:
            raise self._errors[0]
        value = max(self._found, key=lambda value: self._found[value].peak)
        self._step.read_as = value
        return self._found[value]

    @property
    def line(self) -> str:
        """Where values decide."""
        error = self._errors.get(0)
        if self._reads and not isinstance(error, RuntimeError):
            return ", and at ".join(self._reads[:3])
        assert error is not None
        return line_of(traceback.extract_tb(error.__traceback__))
