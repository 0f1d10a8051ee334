"""``MeshRanks``: the ranks of a mesh, which go on together or raise the same error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from colossalai.auto_parallel.tensor_shard.solver import InfeasibleBudgetError
from colossalai.mesh import Mesh
from colossalai.mesh.agreement import everyone

_Result = TypeVar("_Result")


class MeshRanks:
    """Every rank of ``mesh`` calls the same methods in the same order."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.is_first = not any(mesh.coord.values())
        self._alone = dist.get_backend() == "fake"  # a rank of a job that is only imagined

    def all_succeed(self, task: Callable[[], _Result]) -> _Result:
        """The result of ``task`` if it succeeds on every rank; else an error on every rank."""
        return self._together(task, everyone_tries=True)

    def first_succeeds(self, task: Callable[[], _Result]) -> _Result | None:
        """The result of ``task`` on the first rank, and None on others; its error is raised on every rank."""
        return self._together(lambda: task() if self.is_first or self._alone else None, everyone_tries=False)

    def from_first(self, fact: Any) -> Any:
        """What the first rank says."""
        return self._everyone(fact)[0][1]

    def all_alike(self, fact: str) -> None:
        """Refuse ranks whose models or batches differ."""
        told = self._everyone(fact)
        if strange := [coord for coord, other in told if other != told[0][1]]:
            raise ValueError(
                f"the model or meta_args of rank {_where(strange[0])} of the mesh differ from those of the"
                " first rank: all ranks must call autoparallelize with the same model and the same shapes"
            )

    def _everyone(self, fact: Any) -> list[tuple[dict[str, int], Any]]:
        return [(self.mesh.coord, fact)] if self._alone else everyone(fact, self.mesh.axes, self.mesh)

    def _together(self, task: Callable[[], _Result], everyone_tries: bool) -> _Result:
        error: Exception | None = None
        result: list[_Result] = []
        try:
            result.append(task())
        except Exception as failed:
            error = failed
        told = None if error is None else (_kind(error), str(error), _numbers(error))
        facts = self._everyone(told)
        failures = [(coord, fact) for coord, fact in facts if fact is not None]
        if not failures:
            return result[0]
        if error is not None and (len(failures) == len(facts) or not everyone_tries):
            raise error
        coord, (kind, text, numbers) = failures[0]
        if numbers is not None:
            raise InfeasibleBudgetError(*numbers) from error
        if everyone_tries:
            text = f"rank {_where(coord)} of the mesh: {text}"
        raise _KINDS[kind](text) from error


_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ImportError, OSError, TimeoutError, TypeError, ValueError, RuntimeError)
}


def _kind(error: Exception) -> str:
    """The name of the most special of ``_KINDS`` that an error is."""
    return next((c.__name__ for c in type(error).__mro__ if c.__name__ in _KINDS), RuntimeError.__name__)


def _where(coord: dict[str, int]) -> str:
    return " x ".join(f"{axis}={place}" for axis, place in coord.items())


def _numbers(error: Exception) -> tuple[float, float] | None:
    return (error.budget, error.minimum) if isinstance(error, InfeasibleBudgetError) else None
