"""Small helpers for scripts: printing once, running once, optional contexts, norms of gradients, Apex's list
operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from colossalai.logging import DistributedLogger
from colossalai.logging.rank import global_rank
from colossalai.mesh import clip_grads, grad_zeros
from colossalai.utils.parallel import launched_mesh

P = ParamSpec("P")
R = TypeVar("R")


def print_rank_0(msg: str, logger: DistributedLogger | None = None) -> None:
    """Print on the first rank of the job only, or log there if a logger is given."""
    if logger is not None and not hasattr(logger, "info"):
        raise TypeError(
            f"print_rank_0 takes one message, and a logger; the second argument is {logger!r}: join the parts"
            " of the message in one string"
        )
    if global_rank() != 0:
        return
    if logger is None:
        print(msg, flush=True)
    else:
        logger.info(msg)


@contextmanager
def conditional_context(context_manager: AbstractContextManager[Any], enable: bool = True) -> Iterator[None]:
    """``context_manager`` if ``enable``, otherwise nothing."""
    if enable:
        with context_manager:
            yield
    else:
        yield


def disposable(func: Callable[P, R]) -> Callable[P, R | None]:
    """A function that runs at its first call only; later calls do nothing and return ``None``."""
    used = False

    @functools.wraps(func)
    def once(*args: P.args, **kwargs: P.kwargs) -> R | None:
        nonlocal used
        if used:
            return None
        used = True
        return func(*args, **kwargs)

    return once


def ensure_path_exists(filename: str | Path) -> None:
    """Create the directory that the file ``filename`` goes into."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


# ---- Norms and counts over the gradients of the whole model, wherever its parts lie ----


def clip_grad_norm_fp32(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
) -> float:
    """Scale all gradients so that their norm, computed in fp32 over the whole model, is at most ``max_norm``.

    Pieces of a parameter that is cut over ranks are added up, copies are counted once.  Returns the norm
    before.
    """
    return float(clip_grads(_list(parameters), max_norm, launched_mesh(), norm_type))


def count_zeros_fp32(parameters: Tensor | Iterable[Tensor]) -> int:
    """How many elements of all gradients are zero; pieces are added up, copies are counted once."""
    return grad_zeros(_list(parameters), launched_mesh())


def _list(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


# Operations on lists of tensors, called as in Apex: ``op(chunk_size, noop_flag_buffer, tensor_lists,
# *args)``.
#
# This is for operations that users bring along. The optimizers of this package work on lists by themselves,
# with the kernels of ``colossalai.kernel``, which need neither chunks nor a flag.


class MultiTensorApply:
    """Calls an operation with its chunk size, after a look at the lists.

    Args:
        chunk_size: how many elements a block of the operation takes.
    """

    available = True  # Apex says here whether its extension was built; nothing needs building

    def __init__(self, chunk_size: int) -> None:
        if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
            raise ValueError(
                "MultiTensorApply needs chunk_size, a number of elements, as an int above 0; got"
                f" {chunk_size!r}"
            )
        self.chunk_size = chunk_size

    def __call__(
        self,
        op: Callable[..., Any],
        noop_flag_buffer: Tensor,
        tensor_lists: Sequence[Sequence[Tensor]],
        *args: Any,
    ) -> Any:
        """``op`` on lists whose tensors belong together by position; ``noop_flag_buffer`` is where it notes
        an overflow.
        """
        lengths = [len(tensors) for tensors in tensor_lists]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"multi_tensor_applier needs lists of one length, got lists of {lengths} tensors"
            )
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)
