"""Weights that are kept twice: in the model, and beside it with more digits or on another device.

[Note: which weights count]
The weight in the model counts.  What is kept beside it (a float32 master, the digits that bfloat16 lacks, a copy on the host) only adds
digits: it stays where it rounds to the weight, and elsewhere starts again from the weight (``renew_``).  So a model and its optimizer may be
loaded in any order, and either without the other.

The two are compared before a step and before saving, where somebody else may have written since our last step:

- Scripts, ``load_state_dict`` and ``DistributedDataParallel`` write through torch, which counts the changes of a tensor (its version).
- ``booster.load`` reads files straight into memory, which torch does not count.  It says so afterwards, by
  ``OptimizerWrapper.weights_loaded``, whatever it wrote: weights, masters or both.

What a plan writes itself is no change: a slice that an optimizer steps has a counter of its own (``zero.pieces``), apart from that of the
buffer which it lies in, and which collectives write to.

A tail (``colossalai.kernel.split``) means nothing without the very weight that it was cut from, so it cannot be compared: it is dropped where
its weight has changed.  Checkpoints hold masters in its place.  A loaded master waits until the next step, because the model may be
loaded after the optimizer.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def renew_(kept: Tensor, weight: Tensor) -> None:
    """Start ``kept`` again from ``weight`` where it does not round to it; it is not written to if it does everywhere."""
    weight = weight.to(kept.device)
    same = kept.to(weight.dtype) == weight
    if not bool(same.all()):
        kept.copy_(torch.where(same, kept, weight.to(kept.dtype)))
