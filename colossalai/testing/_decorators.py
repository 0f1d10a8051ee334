"""Decorators for tests and for the functions that ranks run."""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    import pytest


Function = TypeVar("Function", bound=Callable[..., Any])
Decorator = Callable[[Function], Function]


def parameterize(argument: str, values: Iterable[Any]) -> Decorator:
    """Call the function once for each value, in the same process: ranks are started once for all cases.

    Decorators stack, the outermost varying slowest.  stderr names the value for which a call failed.
    """
    cases = list(values)

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        if argument not in signature.parameters:
            raise TypeError(
                f"parameterize({argument!r}, ...) needs a function with that argument, "
                f"but {function.__name__} has ({', '.join(signature.parameters)})"
            )

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> None:
            for value in cases:
                try:
                    function(*args, **{**kwargs, argument: value})
                except BaseException:
                    print(f"{function.__name__} failed with {argument} = {value!r}", file=sys.stderr)
                    raise

        # pytest would look for a fixture of that name
        remaining = [p for name, p in signature.parameters.items() if name != argument]
        run.__signature__ = signature.replace(parameters=remaining)  # type: ignore[attr-defined]
        return run  # type: ignore[return-value]

    return decorate


def rerun_on_exception(
    exception_type: type[BaseException] | tuple[type[BaseException], ...] = Exception,
    pattern: str | None = None,
    max_try: int | None = 5,
) -> Decorator:
    """Call the function again when it raises ``exception_type`` with a message in which ``pattern`` is found.

    After ``max_try`` calls the exception is let through; ``None`` means never.
    """
    if max_try is not None and max_try < 1:
        raise ValueError(f"max_try counts the calls and is at least 1, got {max_try}")

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            tries = 0
            while True:
                tries += 1
                try:
                    return function(*args, **kwargs)
                except exception_type as error:
                    if tries == max_try or (pattern is not None and not re.search(pattern, str(error))):
                        raise
                    print(
                        f"{function.__name__} failed at try {tries} and runs again: {error}", file=sys.stderr
                    )

        return run  # type: ignore[return-value]

    return decorate


def rerun_if_address_is_in_use() -> Decorator:
    """Call the function again when another process took its port.

    ``spawn`` chooses ports that need no rerun.
    """
    return rerun_on_exception((OSError, RuntimeError), r"(?i)address already in use|EADDRINUSE")


def skip_if_not_enough_gpus(min_gpus: int) -> Decorator:
    """Skip the test on a machine with fewer GPUs."""
    return _skip_unless(
        lambda: torch.cuda.device_count() >= min_gpus,
        lambda: f"needs {min_gpus} GPUs, this machine has {torch.cuda.device_count()}",
    )


def run_on_environment_flag(name: str) -> Decorator:
    """Skip the test unless the environment variable ``name`` is 1."""
    return _skip_unless(lambda: os.environ.get(name) == "1", lambda: f"runs with {name}=1 in the environment")


def clear_cache_before_run() -> Decorator:
    """Free what earlier tests left on the GPU, and restart its statistics, before the function runs."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            return function(*args, **kwargs)

        return run  # type: ignore[return-value]

    return decorate


def _skip_unless(condition: Callable[[], bool], reason: Callable[[], str]) -> Decorator:
    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not condition():
                import pytest  # only tests need it

                pytest.skip(reason())
            return function(*args, **kwargs)

        return run  # type: ignore[return-value]

    return decorate


# ---- Many generated cases, of which CI runs a sample that is the same every time ----

Case = TypeVar("Case")
_GOLDEN = (math.sqrt(5) - 1) / 2


def sample_cases(cases: Sequence[Case], n: int) -> list[Case]:
    """``n`` of ``cases``, in their order: one from each of ``n`` equal stretches.

    Where in its stretch varies by the golden ratio: a fixed step through a product of lists, say every eighth
    case, would meet the same element of an inner list each time.
    """
    if n < 1:
        raise ValueError(f"a sample has at least one case, got n={n}")
    if n >= len(cases):
        return list(cases)
    bounds = [i * len(cases) // n for i in range(n + 1)]
    return [cases[a + int(i * _GOLDEN % 1 * (b - a))] for i, (a, b) in enumerate(itertools.pairwise(bounds))]


def parametrize_sample(
    names: str, cases: Sequence[Any], n: int, *, ids: Sequence[str] | None = None
) -> pytest.MarkDecorator:
    """``pytest.mark.parametrize`` over all ``cases``; those outside a sample of ``n`` are marked ``slow``."""
    import pytest  # only tests need it

    if ids is not None and len(ids) != len(cases):
        raise ValueError(f"{len(cases)} cases need as many ids, got {len(ids)}")
    chosen = set(sample_cases(range(len(cases)), n))
    single = "," not in names
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(
                *((case,) if single else case),
                marks=() if i in chosen else pytest.mark.slow,
                id=None if ids is None else ids[i],
            )
            for i, case in enumerate(cases)
        ],
    )
