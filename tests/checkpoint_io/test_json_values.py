"""Values as JSON and back."""

from __future__ import annotations

import json
import math
from collections import Counter
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch

from colossalai.checkpoint_io.json_values import decode, encode


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        0.1,
        math.inf,
        "text",
        [1, (2, 3), {"a": (4,)}],
        {1: "a", (2, "b"): None},
        {"$tuple": 1},
        Counter({3: 2}),
        {1, 2},
        b"\x00\xff",
    ],
)
def test_values_come_back_as_they_were(value: Any) -> None:
    back = decode(json.loads(json.dumps(encode(value))))
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 2)])
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    back = decode(json.loads(json.dumps(encode(tensor))))
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


def test_numbers_and_arrays_of_numpy() -> None:
    assert encode(np.float64(0.5)) == 0.5
    back = decode(encode({"array": np.arange(3, dtype=np.uint32)}))["array"]
    assert back.dtype == np.uint32
    assert back.tolist() == [0, 1, 2]


class _Color(Enum):
    RED = 1


@pytest.mark.parametrize("value", [object(), _Color.RED, lambda: None, torch.empty(2, device="meta")])
def test_what_json_cannot_hold_is_refused_by_name(value: Any) -> None:
    with pytest.raises(
        TypeError, match=r"state\.a\[1\] is a .*, and a checkpoint holds numbers, strings, tensors"
    ):
        encode({"a": [0, value]}, "state")


@pytest.mark.parametrize(
    "value",
    [
        {"$unknown": 1},
        {"$tuple": 3},
        {"$tuple": [], "more": 1},
        {"$tensor": {"dtype": "F32", "shape": [3], "data": "AAAA"}},
        {"$tensor": {"dtype": "object", "shape": [], "data": ""}},
        {"$bytes": "no base64!"},
        {"$items": [[[1], 2]]},
    ],
)
def test_damaged_values_are_refused(value: Any) -> None:
    with pytest.raises(RuntimeError, match=r"state\.x cannot be read"):
        decode({"x": value}, "state")
