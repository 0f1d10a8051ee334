from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

import colossalai
from colossalai.context import Config, ConfigException, ParallelContext, ParallelMode, SingletonMeta
from colossalai.context.dist_group_initializer import Initializer_2p5D as SameInitializer
from colossalai.context.initializer import TableInitializer
from colossalai.context.process_group_initializer import (
    Initializer_2D,
    Initializer_2D_Row,
    Initializer_2p5D,
    Initializer_2p5D_XZ,
)
from colossalai.core import global_context as gpc
from colossalai.global_variables import TensorParallelEnv, tensor_parallel_env
from colossalai.mesh import Mesh
from colossalai.registry import DIST_GROUP_INITIALIZER
from colossalai.testing import spawn


def test_the_context_is_one_object() -> None:
    assert ParallelContext() is gpc
    assert type(ParallelContext) is SingletonMeta

    class Single(metaclass=SingletonMeta):
        def __init__(self, value: int = 0) -> None:
            self.value = value

    assert Single(3) is Single()
    assert Single().value == 3
    with pytest.raises(
        TypeError, match=r"Single has one instance per process and it exists already; call Single\(\)"
    ):
        Single(4)


def test_before_launch() -> None:
    assert gpc.config == Config()
    assert (
        gpc.world_size
        == gpc.data_parallel_size
        == gpc.pipeline_parallel_size
        == gpc.tensor_parallel_size
        == 1
    )
    assert not any(gpc.is_initialized(mode) for mode in ParallelMode)
    with pytest.raises(
        RuntimeError, match=r"ParallelMode\.DATA has no process group yet; call colossalai\.launch first"
    ):
        gpc.get_group(ParallelMode.DATA)
    with pytest.raises(RuntimeError, match=r"ParallelMode\.GLOBAL has no process group yet"):
        gpc.get_global_rank()
    with pytest.raises(RuntimeError, match=r"there is no mesh yet; call colossalai\.launch first"):
        _ = gpc.mesh
    with pytest.raises(TypeError, match="expected a ParallelMode, got str 'data'"):
        gpc.get_group("data")  # type: ignore[arg-type]


def test_load_config_checks_all_that_needs_no_world() -> None:
    gpc.load_config({"parallel": {"pipeline": 2}, "BATCH_SIZE": 32})
    assert gpc.config.BATCH_SIZE == 32
    with pytest.raises(ConfigException, match="has size 4 but no mode"):
        gpc.load_config({"parallel": {"tensor": 4}})
    assert gpc.config.BATCH_SIZE == 32  # a refused config changes nothing
    with pytest.raises(ConfigException, match="world size 1 is not a multiple of pipeline 2 x tensor 1 = 2"):
        gpc.check_sanity()


def _every_method(rank: int, world_size: int, port: int) -> None:
    config = {"parallel": {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}}
    colossalai.launch(config, rank, world_size, "localhost", port, verbose=False)
    assert gpc.get_global_rank() == rank
    assert gpc.config.parallel.tensor.mode == "1d"
    assert isinstance(gpc.mesh, Mesh)
    assert gpc.mesh.size == {"dp": 1, "pp": 2, "tp": 2}
    assert gpc.verbose is False

    # the stages of a pipeline, with and without chunks
    first, last = rank < 2, rank >= 2
    assert (gpc.is_pipeline_first_stage(), gpc.is_pipeline_last_stage()) == (first, last)
    assert gpc.virtual_pipeline_parallel_size is None
    gpc.set_virtual_pipeline_parallel_size(2)
    for chunk in (0, 1):
        gpc.set_virtual_pipeline_parallel_rank(chunk)
        assert gpc.virtual_pipeline_parallel_rank == chunk
        assert gpc.is_pipeline_first_stage() == (first and chunk == 0)
        assert gpc.is_pipeline_last_stage() == (last and chunk == 1)
        assert gpc.is_pipeline_first_stage(ignore_virtual=True) == first
        assert gpc.is_pipeline_last_stage(ignore_virtual=True) == last
    gpc.set_virtual_pipeline_parallel_rank(None)
    assert (gpc.is_pipeline_first_stage(), gpc.is_pipeline_last_stage()) == (first, last)

    # a mode that this config does not create
    with pytest.raises(
        RuntimeError,
        match=re.escape(
            "ParallelMode.PARALLEL_2D_ROW has no process group under tensor mode '1d'; it is created by "
            "parallel=dict(tensor=dict(size=..., mode='2d'))"
        ),
    ):
        gpc.get_group(ParallelMode.PARALLEL_2D_ROW)

    # groups that join the same ranks are one group
    assert gpc.get_group(ParallelMode.TENSOR) is gpc.get_group(ParallelMode.PARALLEL_1D)
    assert gpc.get_group(ParallelMode.MODEL) is gpc.get_group(ParallelMode.GLOBAL) is dist.group.WORLD
    gpc.add_global_rank(ParallelMode.GLOBAL, 7)
    assert gpc.get_global_rank() == 7

    gpc.destroy()
    assert not gpc.is_initialized(ParallelMode.GLOBAL)
    assert gpc.config == {}
    assert gpc.virtual_pipeline_parallel_size is None


def test_methods_on_four_ranks() -> None:
    spawn(_every_method, 4)


def test_refused_virtual_stages() -> None:
    for wrong in (0, -1, True, 2.0):
        with pytest.raises(
            ValueError, match=f"virtual pipeline size must be a positive integer or None, got {wrong}"
        ):
            gpc.set_virtual_pipeline_parallel_size(wrong)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"virtual pipeline rank 0 is outside the virtual pipeline size None; call"
    ):
        gpc.set_virtual_pipeline_parallel_rank(0)
    gpc.set_virtual_pipeline_parallel_size(2)
    for wrong in (2, -1, True):
        with pytest.raises(ValueError, match=f"rank {wrong} is outside the virtual pipeline size 2"):
            gpc.set_virtual_pipeline_parallel_rank(wrong)


@pytest.mark.parametrize(
    ("tensor", "fields"),
    [
        ({"size": 4, "mode": "1d"}, {"mode": "1d"}),
        ({"size": 4, "mode": "2d"}, {"mode": "2d", "summa_dim": 2}),
        ({"size": 8, "mode": "2.5d", "depth": 2}, {"mode": "2.5d", "tesseract_dim": 2, "tesseract_dep": 2}),
        (
            {"size": 8, "mode": "3d"},
            {
                "mode": "3d",
                "depth_3d": 2,
                "input_group_3d": ParallelMode.PARALLEL_3D_INPUT,
                "weight_group_3d": ParallelMode.PARALLEL_3D_WEIGHT,
                "output_group_3d": ParallelMode.PARALLEL_3D_OUTPUT,
                "input_x_weight_group_3d": ParallelMode.PARALLEL_3D_INPUT_X_WEIGHT,
                "output_x_weight_group_3d": ParallelMode.PARALLEL_3D_OUTPUT_X_WEIGHT,
            },
        ),
    ],
)
def test_what_tensor_parallel_env_says(tensor: dict[str, object], fields: dict[str, object]) -> None:
    env = TensorParallelEnv()
    env.load(**colossalai.context.ParallelConfig.parse({"tensor": tensor}).env_fields)
    assert {name: value for name, value in env.save().items() if value} == fields


def test_tensor_parallel_env_loads_what_it_saved() -> None:
    tensor_parallel_env.load(mode="1d", vocab_parallel=True, parallel_input_1d=True)
    saved = tensor_parallel_env.save()
    tensor_parallel_env.load("2d")
    assert (tensor_parallel_env.mode, tensor_parallel_env.vocab_parallel) == ("2d", False)
    tensor_parallel_env.load(**saved)
    assert tensor_parallel_env.save() == saved
    with pytest.raises(TypeError, match="summa_dimension"):
        tensor_parallel_env.load(summa_dimension=2)


def test_every_documented_initializer_is_registered() -> None:
    parts = (
        "Data Model Pipeline Tensor 1D 2D 2D_Row 2D_Col 2p5D 2p5D_ROW 2p5D_Col 2p5D_Dep 2p5D_XZ 3D 3D_Input"
    )
    parts += " 3D_Weight 3D_Output 3D_InputxWeight 3D_OutputxWeight Sequence Sequence_DP"
    for part in parts.split():
        assert issubclass(DIST_GROUP_INITIALIZER.get_module(f"Initializer_{part}"), TableInitializer)  # type: ignore[arg-type]
    assert SameInitializer is Initializer_2p5D


def _initializers_by_hand(rank: int, world_size: int, port: int) -> None:
    colossalai.launch({}, rank, world_size, "localhost", port, verbose=False)
    config = Config(parallel={"tensor": {"size": 4, "mode": "2d"}})
    rows, cols = {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}, {0: [0, 2], 1: [1, 3], 2: [0, 2], 3: [1, 3]}
    col_info, row_info = Initializer_2D(rank, world_size, config, 1, 1, 4).init_dist_group()
    assert (row_info[4], row_info[5]) == (rows[rank], ParallelMode.PARALLEL_2D_ROW)
    assert (col_info[4], col_info[5]) == (cols[rank], ParallelMode.PARALLEL_2D_COL)
    local_rank, size, group, cpu_group, ranks, _mode = Initializer_2D_Row(
        rank, world_size, config
    ).init_parallel_groups()
    assert (local_rank, size, ranks) == (rank % 2, 2, rows[rank])
    for one in (group, cpu_group):
        total = torch.tensor([rank])
        dist.all_reduce(total, group=one)
        assert total.item() == sum(rows[rank])
    depth = Config(parallel={"tensor": {"size": 4, "mode": "2.5d", "depth": 4}})
    assert Initializer_2p5D_XZ(rank, world_size, depth, 1, 1, 4, 4).init_dist_group().ranks == [0, 1, 2, 3]
    with pytest.raises(
        ConfigException,
        match=r"Initializer_2D cannot make ParallelMode.PARALLEL_2D_COL with tensor mode '2.5d'",
    ):
        Initializer_2D(rank, world_size, depth, 1, 1, 4).init_dist_group()


def test_initializers_work_without_the_context() -> None:
    spawn(_initializers_by_hand, 4)
