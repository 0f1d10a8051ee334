"""The places of a model's parts: virtual stages, ranks of the pipeline and chunks.

A model is cut into *virtual stages* 0, 1, 2 ... in the order of its layers.  A rank holds one of them, or
several, which are then its *chunks* 0, 1, ...  Two ways of dealing them out are in use (4 ranks, 2 chunks)::

    LOOP  rank 0: 0, 4   rank 1: 1, 5   rank 2: 2, 6   rank 3: 3, 7
    VEE   rank 0: 0, 7   rank 1: 1, 6   rank 2: 2, 5   rank 3: 3, 4
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from colossalai.core import global_context as gpc
from colossalai.mesh import PIPELINE_AXIS, Mesh


class Shape(Enum):
    LOOP = "every chunk goes through the ranks in their order"
    VEE = "every other chunk comes back in reverse order, so the first rank also holds the last stage"


@dataclass(frozen=True)
class Placement:
    """``ranks`` of a pipeline with ``chunks`` virtual stages each."""

    ranks: int
    chunks: int = 1
    shape: Shape = Shape.LOOP

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    @property
    def last(self) -> int:
        return self.stages - 1

    def stage(self, rank: int, chunk: int) -> int:
        """The virtual stage that is ``chunk`` of ``rank``."""
        back = self.shape is Shape.VEE and chunk % 2 == 1
        return chunk * self.ranks + (self.ranks - 1 - rank if back else rank)

    def rank(self, stage: int) -> int:
        chunk, place = divmod(stage, self.ranks)
        back = self.shape is Shape.VEE and chunk % 2 == 1
        return self.ranks - 1 - place if back else place

    def chunk(self, stage: int) -> int:
        return stage // self.ranks

    @property
    def loss_rank(self) -> int:
        """The rank of the pipeline that holds the last layers, and so the loss."""
        return self.rank(self.last)


def launched_shape() -> Shape:
    """How the schedule in the config of the job deals out virtual stages."""
    return Shape.VEE if gpc.plan.is_vee else Shape.LOOP


def pipeline_rank(mesh: Mesh) -> int:
    """This rank's place in its pipeline; 0 on a mesh without one."""
    return mesh.coord.get(PIPELINE_AXIS, 0)


def pipeline_size(mesh: Mesh) -> int:
    """How many ranks a pipeline has; 1 on a mesh without one."""
    return mesh.size.get(PIPELINE_AXIS, 1)


def own_stage(chunk: int, chunks: int) -> int:
    """The virtual stage that is ``chunk`` of the ``chunks`` of this rank, in the launched job."""
    placement = Placement(pipeline_size(gpc.mesh), chunks, launched_shape())
    return placement.stage(pipeline_rank(gpc.mesh), chunk)
