"""Names of torch that differ between the versions we support (2.11 to 2.13), or that are private."""

from __future__ import annotations

import torch
import torch.distributed as dist

# 2.13 renames them and warns about the old names
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# inside this block a tensor of a class of its own is the plain tensor of its memory
plain_torch = torch._C.DisableTorchFunctionSubclass
