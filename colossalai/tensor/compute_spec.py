"""``ComputeSpec``: how a weight takes part in computations."""

from __future__ import annotations

from enum import Enum


class ComputePattern(Enum):
    """The documented tensor-parallel forms.  A ``ProcessGroup`` has one tensor axis, which is ``TP1D``."""

    TP1D = 0
    TP2D = 1
    TP2P5D = 2
    TP3D = 3


class ComputeSpec:
    """Products with this weight run where its pieces lie, instead of bringing the weight together first.

    ``output_replicate`` says whether a result that comes out cut is made whole.  It says nothing about
    results that come out as sums (a weight that is cut along the dim that is summed over): these are always
    added up, hence whole.
    """

    def __init__(self, compute_pattern: ComputePattern) -> None:
        if not isinstance(compute_pattern, ComputePattern):
            raise TypeError(f"ComputeSpec takes a ComputePattern, got {compute_pattern!r}")
        if compute_pattern is not ComputePattern.TP1D:
            raise ValueError(
                f"ComputeSpec({compute_pattern}): a ProcessGroup has one tensor axis, so weights with a spec"
                " compute by ComputePattern.TP1D; the layers of colossalai.nn offer 2D, 2.5D and 3D"
            )
        self.compute_pattern = compute_pattern
        self.output_replicate = True

    def set_output_replicate(self, flag: bool = True) -> None:
        self.output_replicate = flag

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ComputeSpec) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]  # it can be changed

    def __repr__(self) -> str:
        return f"ComputeSpec({self.compute_pattern}, output_replicate={self.output_replicate})"
