"""Masters: copies of weights that an optimizer keeps with more digits, or on another device.

[Note: which weights count] The weight in the model counts.  What an optimizer keeps beside it (a float32
master, the digits that bfloat16 lacks, a copy on the host) only adds digits: it stays where it rounds to the
weight, and elsewhere starts again from the weight (``refresh_master_``).  So a model and its optimizer may be
loaded in any order, and either without the other.

The two are compared before a step and before saving, where another part of the
program may have written to the weight since the last step:

- Scripts, ``load_state_dict`` and ``DistributedDataParallel`` write through torch, which counts the changes
  of a tensor (its version).
- A script may write by ``p.data``, which torch does not count: weights are compared now and then, and in
  every step after such a write was found (``UncountedWrites``).
- ``booster.load`` reads files straight into memory, which torch does not count.  It says so afterwards, by
  ``OptimizerWrapper.weights_loaded``, whatever it wrote: weights, masters or both.

What a plan writes itself is no change: a slice that an optimizer steps has a counter of its own
(``zero.pieces``), apart from that of the buffer which it lies in, and which collectives write to.

A tail (``kernel.optimizer.split``) means nothing without the very weight that it was cut from, so it cannot
be compared: it is dropped where its weight has changed.  Checkpoints hold masters in its place.  A loaded
master waits until the next step, because the model may be loaded after the optimizer.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from colossalai.mesh.uncounted_writes import is_watched

BLOCK = 1 << 22  # elements that are compared at a time: to compare must not need the memory of a weight


class UncountedWrites:
    """Decides when masters are compared with weights though torch has counted
    no change, and warns of what it finds.
    """

    def __init__(self) -> None:
        self._steps, self._always = 0, False

    def is_due(self) -> bool:
        """Whether the step that begins now compares all masters."""
        self._steps += 1
        return self._always or is_watched(self._steps)

    def refresh_(self, master: Tensor, weight: Tensor, *, has_changed: bool, compares: bool) -> None:
        """Bring to ``master`` what others wrote to ``weight``.

        Args:
            has_changed: whether torch has counted a write, or a checkpoint has told of one.
            compares: whether to look for writes that torch has not counted.
        """
        if (has_changed or compares) and refresh_master_(master, weight) and not has_changed:
            self._found()

    def _found(self) -> None:
        if not self._always:
            self._always = True
            since = (
                ""
                if self._steps <= 2
                else f"  Writes in the {self._steps - self._steps // 2} steps before may have been lost."
            )
            warnings.warn(
                "weights were written to by p.data (or Tensor.set_), which torch does not count, while the"
                " optimizer keeps copies of them with more digits or on another device; from now on they are"
                f" compared in every step, which takes time: write `with torch.no_grad(): p.copy_(...)`"
                f" instead.{since}",
                stacklevel=2,
            )


@torch.no_grad()
def current_master(kept: Tensor, weight: Tensor) -> Tensor:
    """Return ``kept`` where it rounds to ``weight``, elsewhere the weight.

    ``kept`` itself if it does everywhere.
    """
    if kept.is_meta or all(map(_rounds, kept.reshape(-1).split(BLOCK), weight.reshape(-1).split(BLOCK))):
        return kept
    weight = weight.to(kept.device)
    return torch.where(_same(kept, weight), kept, weight.to(kept.dtype))


def _rounds(kept: Tensor, weight: Tensor) -> bool:
    return bool(_same(kept, weight.to(kept.device)).all())


def _same(kept: Tensor, weight: Tensor) -> Tensor:
    rounded = kept.to(weight.dtype)
    return (rounded == weight) | (rounded.isnan() & weight.isnan())


@torch.no_grad()
def refresh_master_(kept: Tensor, weight: Tensor) -> bool:
    """Start ``kept`` again from ``weight`` where it does not round to it.

    Returns whether there was any such place.
    """
    now = current_master(kept, weight)
    if now is not kept:
        kept.copy_(now)
    return now is not kept
