"""The documented initializers: each is a name for some modes of the one table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colossalai.context.initializer import GroupInfo, ProcessGroupInitializer, TableInitializer
from colossalai.context.parallel_config import ParallelConfig
from colossalai.context.parallel_mode import ParallelMode
from colossalai.context.tensor_modes import EXPERT_MODES, SEQUENCE_MODES, TENSOR_MODES
from colossalai.mesh import PIPELINE_AXIS, mesh_groups
from colossalai.registry import DIST_GROUP_INITIALIZER

__all__ = [
    "GroupInfo",
    "Initializer_1D",
    "Initializer_2D",
    "Initializer_2D_Col",
    "Initializer_2D_Row",
    "Initializer_2p5D",
    "Initializer_2p5D_Col",
    "Initializer_2p5D_Dep",
    "Initializer_2p5D_ROW",
    "Initializer_2p5D_XZ",
    "Initializer_3D",
    "Initializer_3D_Input",
    "Initializer_3D_InputxWeight",
    "Initializer_3D_Output",
    "Initializer_3D_OutputxWeight",
    "Initializer_3D_Weight",
    "Initializer_Data",
    "Initializer_Embedding",
    "Initializer_Model",
    "Initializer_Moe",
    "Initializer_Pipeline",
    "Initializer_Sequence",
    "Initializer_Sequence_DP",
    "Initializer_Tensor",
    "ProcessGroupInitializer",
]


@DIST_GROUP_INITIALIZER.register_module
class Initializer_Data(TableInitializer):
    modes = (ParallelMode.DATA,)


@DIST_GROUP_INITIALIZER.register_module
class Initializer_Model(TableInitializer):
    modes = (ParallelMode.MODEL,)


@DIST_GROUP_INITIALIZER.register_module
class Initializer_Pipeline(TableInitializer):
    modes = (ParallelMode.PIPELINE,)


@DIST_GROUP_INITIALIZER.register_module
class Initializer_Tensor(TableInitializer):
    modes = (ParallelMode.TENSOR,)


@DIST_GROUP_INITIALIZER.register_module
class Initializer_1D(TableInitializer):
    modes = tuple(TENSOR_MODES["1d"].modes)


@DIST_GROUP_INITIALIZER.register_module
class Initializer_2D(TableInitializer):
    modes = tuple(TENSOR_MODES["2d"].modes)


@DIST_GROUP_INITIALIZER.register_module
class Initializer_2D_Row(TableInitializer):
    modes = (ParallelMode.PARALLEL_2D_ROW,)


@DIST_GROUP_INITIALIZER.register_module
class Initializer_2D_Col(TableInitializer):
    modes = (ParallelMode.PARALLEL_2D_COL,)


@DIST_GROUP_INITIALIZER.register_module
class Initializer_2p5D(TableInitializer):
    modes = tuple(TENSOR_MODES["2.5d"].modes)

    def __init__(
        self,
        rank: int,
        world_size: int,
        config: Mapping[str, Any],
        data_parallel_size: int | None = None,
        pipeline_parallel_size: int | None = None,
        tensor_parallel_size: int | None = None,
        depth: int | None = None,
    ) -> None:
        super().__init__(
            rank, world_size, config, data_parallel_size, pipeline_parallel_size, tensor_parallel_size
        )
        self.depth = depth


@DIST_GROUP_INITIALIZER.register_module
class Initializer_2p5D_ROW(Initializer_2p5D):
    modes = (ParallelMode.PARALLEL_2P5D_ROW,)


@DIST_GROUP_INITIALIZER.register_module
class Initializer_2p5D_Col(Initializer_2p5D):
    modes = (ParallelMode.PARALLEL_2P5D_COL,)


@DIST_GROUP_INITIALIZER.register_module
class Initializer_2p5D_Dep(Initializer_2p5D):
    modes = (ParallelMode.PARALLEL_2P5D_DEP,)


@DIST_GROUP_INITIALIZER.register_module
class Initializer_2p5D_XZ(Initializer_2p5D):
    modes = (ParallelMode.PARALLEL_2P5D_XZ,)


@DIST_GROUP_INITIALIZER.register_module
class Initializer_3D(TableInitializer):
    modes = tuple(TENSOR_MODES["3d"].modes)


@DIST_GROUP_INITIALIZER.register_module
class Initializer_3D_Input(TableInitializer):
    modes = (ParallelMode.PARALLEL_3D_INPUT,)


@DIST_GROUP_INITIALIZER.register_module
class Initializer_3D_Weight(TableInitializer):
    modes = (ParallelMode.PARALLEL_3D_WEIGHT,)


@DIST_GROUP_INITIALIZER.register_module
class Initializer_3D_Output(TableInitializer):
    modes = (ParallelMode.PARALLEL_3D_OUTPUT,)


@DIST_GROUP_INITIALIZER.register_module
class Initializer_3D_InputxWeight(TableInitializer):
    modes = (ParallelMode.PARALLEL_3D_INPUT_X_WEIGHT,)


@DIST_GROUP_INITIALIZER.register_module
class Initializer_3D_OutputxWeight(TableInitializer):
    modes = (ParallelMode.PARALLEL_3D_OUTPUT_X_WEIGHT,)


@DIST_GROUP_INITIALIZER.register_module
class Initializer_Sequence(TableInitializer):
    modes = SEQUENCE_MODES


@DIST_GROUP_INITIALIZER.register_module
class Initializer_Sequence_DP(TableInitializer):
    modes = (ParallelMode.SEQUENCE_DP,)


@DIST_GROUP_INITIALIZER.register_module
class Initializer_Moe(TableInitializer):
    modes = EXPERT_MODES


@DIST_GROUP_INITIALIZER.register_module
class Initializer_Embedding(ProcessGroupInitializer):
    """Makes a group of the first and the last stage of each pipeline; a stage between them is alone.

    No plan needs it, since stages that share a weight find each other; it is there for scripts.
    """

    def init_dist_group(self) -> GroupInfo:
        axes = ParallelConfig.parse(self.config.get("parallel")).fit(self.world_size).axes
        groups: list[list[int]] = []
        for stages in mesh_groups(axes, (PIPELINE_AXIS,)):
            groups += [sorted({stages[0], stages[-1]}), *([rank] for rank in stages[1:-1])]
        return self.new_group(groups, ParallelMode.EMBEDDING)
