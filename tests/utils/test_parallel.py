from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import colossalai
import colossalai.nn as col_nn
from colossalai import utils
from colossalai.context import ParallelMode
from colossalai.context.random import add_seed, reset_seeds, seed
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.mesh import Layout, full_shape, parameter, place, placement
from colossalai.testing import spawn

QUESTIONS = (
    utils.is_dp_rank_0,
    utils.is_tp_rank_0,
    utils.is_no_pp_or_last_stage,
    utils.is_using_ddp,
    utils.is_using_pp,
    utils.is_using_sequence,
)


def _launch(rank: int, world_size: int, port: int, **parallel: Any) -> None:
    colossalai.launch(
        {"parallel": parallel}, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False
    )


def _answers() -> str:
    return "".join("1" if question() else "0" for question in QUESTIONS)


def test_one_process_without_a_launch() -> None:
    assert _answers() == "111000"
    utils.sync_model_param(nn.Linear(2, 2), ParallelMode.DATA)


def test_marks_of_parameters() -> None:
    param = nn.Parameter(torch.ones(2))
    assert not utils.is_model_parallel_parameter(param)
    assert not utils.is_ddp_ignored(param)
    param.is_tensor_parallel = True  # type: ignore[attr-defined]
    param._ddp_to_ignore = True  # type: ignore[attr-defined]
    assert utils.is_model_parallel_parameter(param)
    assert utils.is_ddp_ignored(param)


def test_where_a_tensor_lies_is_copied() -> None:
    cut, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    place(cut, Layout((("tp",),)), (4,))
    assert utils.is_model_parallel_parameter(cut)
    utils.copy_tensor_parallel_attributes(cut, other)
    assert placement(other) == placement(cut)
    assert full_shape(other) == (4,)
    assert not utils.is_model_parallel_parameter(place(nn.Parameter(torch.ones(2)), Layout((("dp",),)), (4,)))
    marked, third = nn.Parameter(torch.ones(2)), torch.ones(2)
    marked.is_tensor_parallel, marked.num_partitions = True, 2  # type: ignore[attr-defined]
    utils.copy_tensor_parallel_attributes(marked, third)
    assert (third.is_tensor_parallel, third.num_partitions) == (True, 2)  # type: ignore[attr-defined]
    utils.copy_tensor_parallel_attributes(torch.ones(1), other)
    assert placement(other) == placement(cut)  # nothing to copy, nothing forgotten
    assert utils.param_is_not_tensor_parallel_duplicate(cut)  # one process holds everything once


def _duplicates(rank: int, world_size: int, port: int) -> None:
    _launch(rank, world_size, port, tensor={"size": 4, "mode": "2d"})
    full = torch.ones(4, 4)
    layouts = [(("row",), ("col",)), (("row",), ()), ((), ("col",)), ((), ())]
    for cuts in layouts:
        p = parameter(full, Layout(cuts), gpc.mesh)
        counted = torch.tensor(float(p.numel() if utils.param_is_not_tensor_parallel_duplicate(p) else 0))
        dist.all_reduce(counted)
        assert counted == 16, cuts  # every element of the whole once


def test_every_element_is_counted_once() -> None:
    spawn(_duplicates, 4)


def test_operations_on_lists() -> None:
    def scale(chunk_size: int, flag: torch.Tensor, lists: list[list[torch.Tensor]], factor: float) -> int:
        for source, target in zip(*lists, strict=True):
            target.copy_(source * factor)
        return chunk_size

    source, target = [torch.ones(2), torch.ones(3)], [torch.zeros(2), torch.zeros(3)]
    flag = torch.zeros(1, dtype=torch.int32)
    assert utils.multi_tensor_applier(scale, flag, [source, target], 3.0) == 2048 * 32
    assert torch.equal(target[1], torch.full((3,), 3.0))
    with pytest.raises(ValueError, match=r"lists of one length, got lists of \[2, 1\] tensors"):
        utils.multi_tensor_applier(scale, flag, [source, target[:1]], 3.0)
    with pytest.raises(ValueError, match="chunk_size, a number of elements, as an int above 0; got 0"):
        utils.MultiTensorApply(0)


def _hybrid(rank: int, world_size: int, port: int) -> None:
    _launch(rank, world_size, port, pipeline=2, tensor={"size": 2, "mode": "1d"})
    # rank order: data, then pipeline, then tensor innermost
    assert _answers() == f"{int(rank < 4)}{int(rank % 2 == 0)}{int(rank % 4 >= 2)}110"


def _sequence(rank: int, world_size: int, port: int) -> None:
    _launch(rank, world_size, port, tensor={"size": 2, "mode": "sequence"})
    assert _answers() == f"1{int(rank == 0)}1001"
    with pytest.raises(ValueError, match="Linear1D needs the tensor mode '1d', but the mode is 'sequence'"):
        col_nn.Linear1D(4, 4)


def test_a_hybrid_plan() -> None:
    spawn(_hybrid, 8)


def test_a_sequence_plan() -> None:
    spawn(_sequence, 2)


def _sync(rank: int, world_size: int, port: int) -> None:
    _launch(rank, world_size, port, tensor={"size": 2, "mode": "1d"})
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, float(rank))
    utils.sync_model_param(model, ParallelMode.DATA)  # the groups (0, 2) and (1, 3)
    assert model.weight.detach().unique().tolist() == [rank % 2]
    assert model.weight.grad is None
    utils.sync_model_param(model, ParallelMode.TENSOR)
    assert model.weight.detach().unique().tolist() == [0]


def test_parameters_are_made_equal_within_a_mode() -> None:
    spawn(_sync, 4)


def _virtual_rank(rank: int, world_size: int, port: int) -> None:
    _launch(rank, world_size, port, pipeline=2)
    gpc.set_virtual_pipeline_parallel_size(3)
    gpc.set_virtual_pipeline_parallel_rank(1)
    with utils.switch_virtual_pipeline_parallel_rank(2):
        assert gpc.virtual_pipeline_parallel_rank == 2
    assert gpc.virtual_pipeline_parallel_rank == 1
    with pytest.raises(KeyError, match="mine"), utils.switch_virtual_pipeline_parallel_rank(0):
        raise KeyError("mine")
    assert gpc.virtual_pipeline_parallel_rank == 1


def test_the_virtual_pipeline_rank_is_restored() -> None:
    spawn(_virtual_rank, 2)


def _dropouts(x: torch.Tensor) -> torch.Tensor:
    x = nn.functional.dropout(x).sin()
    with seed(ParallelMode.TENSOR):
        x = nn.functional.dropout(x).cos()
    return nn.functional.dropout(x).exp()


def _step(reentrant: bool | None) -> list[torch.Tensor]:
    """Output, gradient, and what each stream draws next, with or without checkpointing."""
    gpc.set_seed(5)
    device = utils.get_current_device()  # the streams of the modes are those of the device
    x = torch.linspace(-1, 1, 50, device=device).requires_grad_()
    y = _dropouts(x) if reentrant is None else utils.checkpoint(_dropouts, False, x, use_reentrant=reentrant)
    with seed(ParallelMode.TENSOR):
        torch.rand(2, device=device)
    torch.rand(1, device=device)
    if reentrant is not None:
        with seed(ParallelMode.TENSOR):  # the backward pass may run in another mode than the forward pass
            y.sum().backward()
    else:
        y.sum().backward()
    after = torch.rand(4, device=device)
    with seed(ParallelMode.TENSOR):
        after_tensor = torch.rand(4, device=device)
    assert x.grad is not None
    return [y.detach(), x.grad, after, after_tensor]


def _seeded_checkpoint(rank: int, world_size: int, port: int) -> None:
    _launch(rank, world_size, port, tensor={"size": 2, "mode": "1d"})
    plain = _step(None)
    for reentrant in (True, False):
        for got, expected in zip(_step(reentrant), plain, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
    other = plain[0].cpu().clone()
    dist.broadcast(other, src=0)
    assert torch.equal(other, plain[0].cpu()) == (rank == 0)  # the tensor stream differs between its ranks


def test_checkpoint_repeats_the_streams_of_the_parallel_modes() -> None:
    spawn(_seeded_checkpoint, 2)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_repeats_the_streams_also_where_no_mode_is_current(reentrant: bool) -> None:
    def step(run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        reset_seeds()
        torch.manual_seed(3)
        add_seed(ParallelMode.TENSOR, 4)
        x = torch.linspace(-1, 1, 50, device=utils.get_current_device()).requires_grad_()
        y = run(x)
        torch.rand(1, device=x.device)
        with seed(ParallelMode.TENSOR):
            y.sum().backward()
            after = torch.rand(3, device=x.device)
        assert x.grad is not None
        return [x.grad, after]

    try:
        got = step(lambda x: utils.checkpoint(_dropouts, False, x, use_reentrant=reentrant))
        for value, expected in zip(got, step(_dropouts), strict=True):
            torch.testing.assert_close(value, expected, rtol=0, atol=0)
    finally:
        reset_seeds()


def _log(rank: int, world_size: int, port: int, folder: str) -> None:
    _launch(rank, world_size, port, tensor={"size": 2, "mode": "1d"})
    logger = get_dist_logger()
    logger.log_to_file(folder)
    logger.info("first of its tensor group", parallel_mode=ParallelMode.TENSOR, ranks=[0])
    logger.info("first of its data group", ParallelMode.DATA, [0])


def test_the_logger_knows_the_parallel_modes(tmp_path: Any) -> None:
    spawn(_log, 4, folder=str(tmp_path))
    texts = [(tmp_path / f"rank_{rank}.log").read_text() for rank in range(4)]
    assert [text.count("first of its tensor group") for text in texts] == [1, 0, 1, 0]
    assert [text.count("first of its data group") for text in texts] == [1, 1, 0, 0]
