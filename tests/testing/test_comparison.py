from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from colossalai.testing import (
    RankError,
    assert_close,
    assert_close_loose,
    assert_equal,
    assert_equal_in_group,
    assert_not_equal,
    check_state_dict_equal,
    spawn,
)

ONES = torch.ones(3)


def test_equal_tensors() -> None:
    assert_equal(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]))
    assert_close(ONES, ONES + 1e-7)
    assert_close_loose(ONES, ONES + 1e-3)
    assert_not_equal(ONES, ONES + 1e-6)
    assert_not_equal(ONES, torch.ones(4))


@pytest.mark.parametrize(
    ("check", "other", "message"),
    [
        (assert_equal, ONES + 1e-6, r"the tensors differ: .*(not equal|Mismatched elements: 3 / 3)"),
        (assert_equal, torch.ones(1), "shape"),
        (assert_equal, ONES.double(), "dtype"),
        (assert_close, ONES + 1e-4, "Mismatched elements: 3 / 3"),
        (assert_close_loose, ONES + 1e-2, "Mismatched elements: 3 / 3"),
        (assert_not_equal, torch.ones(3), r"tensors of shape \(3,\) that differ, but they are equal"),
    ],
)
def test_unequal_tensors(check: Callable[[Tensor, Tensor], None], other: Tensor, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check(ONES, other)


def test_tolerances_can_be_given() -> None:
    assert_close(ONES, ONES + 0.1, rtol=0, atol=0.2)
    with pytest.raises(AssertionError, match="Mismatched"):
        assert_close_loose(ONES, ONES + 1e-4, rtol=0, atol=1e-5)


def adam_state() -> dict[str, Any]:
    model = torch.nn.Linear(2, 2)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.Adam([model.weight])
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def test_equal_state_dicts() -> None:
    check_state_dict_equal(adam_state(), adam_state())
    check_state_dict_equal({"a": ONES, "b": [1, "x"]}, {"b": [1, "x"], "a": torch.ones(3)})
    check_state_dict_equal({"a": torch.ones(3, device="meta")}, {"a": torch.ones(3, device="meta")})


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"a": 1, "b": 2}, {"a": 1, 3: 2}, r"only the first has the keys 'b', only the second 3"),
        ({"a": {"w": ONES}}, {"a": {"w": ONES + 1}}, r"state_dict\['a'\]\['w'\]: Tensor-likes are not equal"),
        ({"a": ONES}, {"a": ONES.double()}, r"state_dict\['a'\]: .*dtype"),
        ({"a": [1, 2]}, {"a": [1]}, r"state_dict\['a'\]: the first has 2 items, the second 1"),
        ({"a": [1, 2]}, {"a": [1, 3]}, r"state_dict\['a'\]\[1\]: 2 is not 3"),
        ({"a": "adam"}, {"a": "sgd"}, r"state_dict\['a'\]: 'adam' is not 'sgd'"),
        ({"a": 1}, {"a": True}, r"1 is not True"),
        ({"a": ONES}, {"a": 1}, r"state_dict\['a'\]: tensor"),
    ],
)
def test_unequal_state_dicts(first: dict, second: dict, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_state_dict_equal(first, second)


def test_devices_are_compared_on_request() -> None:
    first, second = adam_state(), adam_state()
    check_state_dict_equal(first, second, ignore_device=False)
    second["state"][0]["exp_avg"] = second["state"][0]["exp_avg"].to("meta")
    with pytest.raises(AssertionError, match=r"\['exp_avg'\]: .*device"):
        check_state_dict_equal(first, second, ignore_device=False)


def check_groups(rank: int, world_size: int, port: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"tcp://127.0.0.1:{port}")
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    assert_equal_in_group(torch.ones(2))
    assert_equal_in_group(torch.full((2,), rank // 2), mine)
    assert_equal_in_group(torch.arange(6.0).view(2, 3).t(), mine)
    with pytest.raises(AssertionError, match=r"(?s)rank 2 differs from rank 0: .*Mismatched elements: 2 / 2"):
        assert_equal_in_group(torch.full((2,), rank // 2))
    peers = (0, 1) if rank < 2 else (2, 3)
    message = (
        rf"rank {peers[1]} holds a tensor of shape \({peers[1] + 1},\) and torch.float32, but rank"
        f" {peers[0]} one"
    )
    with pytest.raises(AssertionError, match=message):
        assert_equal_in_group(torch.ones(rank + 1), mine)


def test_equality_within_a_group_is_judged_alike_on_all_ranks() -> None:
    spawn(check_groups, 4)


def differ(rank: int, world_size: int, port: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"tcp://127.0.0.1:{port}")
    assert_equal_in_group(torch.tensor(rank))


def test_inequality_within_a_group_fails_the_test() -> None:
    with pytest.raises(RankError, match="rank 1 differs from rank 0") as caught:
        spawn(differ, 2)
    assert caught.value.cause_type is AssertionError
