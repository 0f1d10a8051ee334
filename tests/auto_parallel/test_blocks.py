"""Which modules cannot be blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from colossalai.auto_parallel.checkpoint.blocks import find_blocks


def net() -> Any:
    model: Any = nn.Module()
    model.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
    model.head = nn.Linear(4, 2)
    return model


def compiled_block(model: Any) -> None:
    model.layers[1].compile()


def compiled_blocks(model: Any) -> None:
    compiled: list[Any] = [torch.compile(layer) for layer in model.layers]
    model.layers = nn.ModuleList(compiled)


def compiled_inside(model: Any) -> None:
    model.layers[2][0].compile()


def scripted_block(model: Any) -> None:
    model.layers[1] = torch.jit.script(model.layers[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (compiled_block, r"the part 'layers\.1' of Module is compiled already \(Sequential\)"),
        (compiled_blocks, r"the part 'layers\.0' of Module is compiled already \(Sequential\)"),
        (compiled_inside, r"the part 'layers\.2\.0' of Module is compiled already \(Linear\)"),
        (scripted_block, r"the part 'layers\.1' of Module is a ScriptModule.* before torch\.jit"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_parts_are_refused(change: Callable[[Any], None], message: str) -> None:
    model = net()
    change(model)
    with pytest.raises(ValueError, match=message):
        find_blocks(model)


def test_what_is_compiled_beside_blocks() -> None:
    model = net()
    model.head.compile()
    assert list(find_blocks(model)) == ["layers.0", "layers.1", "layers.2"]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripts_are_refused() -> None:
    with pytest.raises(ValueError, match="RecursiveScriptModule is a ScriptModule"):
        find_blocks(torch.jit.script(nn.Sequential(nn.Linear(2, 2))))
