"""Tries once, on a few numbers, whether our Triton kernels run here."""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache

import torch


@cache
def triton_works() -> bool:
    """True if a kernel of ours compiles and gives the right result; False, with one warning that says why, if
    not.
    """
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return False
    try:
        from colossalai.kernel.optimizer import triton_adam

        triton_adam.try_it()
    except Exception as error:  # a compiler, a driver, a version: whatever it is, there is plain PyTorch
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        warnings.warn(f"the Triton kernels do not work here ({reason}); plain PyTorch is used", stacklevel=2)
        return False
    return True
