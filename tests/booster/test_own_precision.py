"""Plugins with a precision of their own take the booster's, and refuse one that contradicts theirs."""

from __future__ import annotations

import re
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from colossalai.booster import Booster
from colossalai.booster.mixed_precision import (
    BF16MixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    MixedPrecision,
)
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin
from colossalai.logging import get_dist_logger
from colossalai.testing import parameterize, spawn
from tests.booster.plans import launch

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class Own(MixedPrecision):
    def configure(self, *parts: Any) -> Any:
        return parts


def trained_dtype(plugin: Any, precision: Any) -> torch.dtype:
    model = nn.Linear(4, 4)
    booster = Booster(mixed_precision=precision, plugin=plugin)
    assert booster.mixed_precision is None
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.backward(boosted(torch.ones(2, 4)).float().sum(), optimizer)
    optimizer.step()
    return next(boosted.parameters()).dtype


@parameterize("kind", [LowLevelZeroPlugin, GeminiPlugin])
def check(rank: int, world_size: int, port: int, kind: Any) -> None:
    if not torch.distributed.is_initialized():
        launch(rank, world_size, port)
    told: list[str] = []
    with patch.object(type(get_dist_logger()), "warning_once", lambda self, text, ranks: told.append(text)):
        assert trained_dtype(kind(), None) is torch.float16
        (text,) = told
        assert re.fullmatch(rf"{kind.__name__} trains in fp16, since no precision was chosen; say .*", text)
        for plugin, precision in ((kind(), "fp16"), (kind(precision="fp16"), None), (kind(), "bf16")):
            trained_dtype(plugin, precision)
        assert len(told) == 1  # what was chosen is not told
    for name, dtype in DTYPES.items():
        assert trained_dtype(kind(), name) is dtype
        assert trained_dtype(kind(precision=name), name) is dtype
        assert trained_dtype(kind(precision=name), None) is dtype
    assert trained_dtype(kind(), BF16MixedPrecision()) is torch.bfloat16
    who = kind.__name__
    for precision, message in (
        ("fp16_naive", "does not support mixed_precision='fp16_naive', only fp16, bf16, fp32"),
        (FP16NaiveMixedPrecision(), "does not support mixed_precision='fp16_naive', only fp16, bf16, fp32"),
        ("int8", "does not support mixed_precision='int8'"),
        (Own(), "does not support mixed_precision=<.*Own object"),
        (FP16TorchMixedPrecision(init_scale=8.0), "options of FP16TorchMixedPrecision would have no effect"),
        (BF16MixedPrecision(half_weights=True), "options of BF16MixedPrecision would have no effect"),
    ):
        with pytest.raises(ValueError, match=f"{who} does its own mixed precision,.* {message}"):
            Booster(mixed_precision=precision, plugin=kind())
    told = f"{who} was given precision='fp16', and the Booster mixed_precision='bf16'; leave one of them out"
    with pytest.raises(ValueError, match=told):
        Booster(mixed_precision="bf16", plugin=kind(precision="fp16"))


def test_the_precision_of_the_booster_is_taken() -> None:
    spawn(check, 1)
