"""Every call into torch that torch does not promise to keep: its fused optimizers and its operations on lists
of tensors.

They are the same from 2.11 to 2.13.  A torch without one of them is refused here, by name, rather than by an
AttributeError in the middle of a training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def find(name: str) -> Callable[..., Any]:
    """The function ``torch.<name>``."""
    function: Callable[..., Any] | None = getattr(torch, name, None)
    if function is None:
        raise ImportError(
            f"PyTorch {torch.__version__} has no torch.{name}, which the optimizers of colossalai call;"
            f" install a version from 2.11 to 2.13"
        )
    return function


# one kernel for the whole update of many tensors of one dtype, on CPU and CUDA
fused_adam_ = find("_fused_adam_")
fused_adamw_ = find("_fused_adamw_")
fused_sgd_ = find("_fused_sgd_")
FUSED_DEVICES = frozenset({"cpu", "cuda"})

# one operation on many tensors, in few launches
add = find("_foreach_add")
add_ = find("_foreach_add_")
addcdiv_ = find("_foreach_addcdiv_")
addcmul_ = find("_foreach_addcmul_")
copy_ = find("_foreach_copy_")
div = find("_foreach_div")
div_ = find("_foreach_div_")
lerp_ = find("_foreach_lerp_")
mul_ = find("_foreach_mul_")
norm = find("_foreach_norm")
sqrt = find("_foreach_sqrt")
sub_ = find("_foreach_sub_")
