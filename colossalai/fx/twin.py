"""``fake_model`` lets a model compute with tensors that have a shape and no memory, and puts all back.

A model is traced as it is: its own code runs, in the mode (training or not) that it is in.  Meanwhile its
parameters and buffers are fake ones on one device, so a model on the meta device, or one that waits for its
memory, is traced as well, and a batch may lie anywhere.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._pytree import tree_map_only

from colossalai.utils.kept_attributes import KeptAttributes
from colossalai.utils.layer_drop import all_layers

RECOMPUTED = "activation_checkpoint"
"""The key of a node's meta under which the number of the checkpointed function lies that it is part of."""


def fake_device(model: nn.Module, device: torch.device | str | None = None) -> torch.device:
    """Where the fake tensors lie: on ``device``, or where the model does; on the CPU if that is nowhere."""
    if device is not None:
        device = torch.device(device)
        if device.type == "cuda" and not torch.cuda.is_available():  # torch would end the process
            raise ValueError(
                f"device={str(device)!r} needs a GPU; without one take 'meta' inside gpu_kernels(), which"
                " computes there as a GPU does"
            )
        return device
    own = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    return torch.device("cpu") if own.type == "meta" else own


def fake_like(tree: Any, mode: FakeTensorMode, device: torch.device) -> Any:
    """``tree`` with a fake tensor on ``device`` for each of its tensors."""

    def fake(tensor: Tensor) -> Tensor:
        with mode, torch.no_grad():
            found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return found.requires_grad_(tensor.requires_grad)

    return tree_map_only(Tensor, fake, tree)


_LAYER_DROP = "layers are left out at a rate of {:g}; the graph has all of them"


@contextmanager
def fake_model(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> Iterator[list[str]]:
    """Within the block, parameters and buffers of ``model`` are fake; afterwards it is what it was.

    Attributes that its code sets meanwhile are forgotten: they would hold fake tensors.  Yields what is
    otherwise in this block, in words.
    """
    modules = list(model.modules())
    kept = KeptAttributes(modules)
    undo: list[Callable[[], None]] = []
    try:
        _take_fakes(modules, mode, device)
        _say_exporting(undo)
        _inline_checkpoints(undo)
        with all_layers(model) as rates:
            yield [*map(_LAYER_DROP.format, rates), *_without_cache(modules, undo)]
    finally:
        for restore in undo:
            restore()
        kept.restore()


def _take_fakes(modules: list[nn.Module], mode: FakeTensorMode, device: torch.device) -> None:
    twins: dict[int, Tensor] = {}  # a tied weight has one
    for module in modules:
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            if id(tensor) not in twins:
                fake = fake_like(tensor.detach(), mode, device)
                if isinstance(tensor, nn.Parameter):
                    with mode:
                        fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                twins[id(tensor)] = fake
            setattr(module, name, twins[id(tensor)])


def _say_exporting(undo: list[Callable[[], None]]) -> None:
    """Let ``torch.compiler.is_exporting()`` be true, by which libraries choose code that needs no values."""
    for flag in ("_is_compiling_flag", "_is_exporting_flag"):
        before = getattr(torch.compiler, flag, None)
        if before is not None:
            undo.append(partial(setattr, torch.compiler, flag, before))
            setattr(torch.compiler, flag, True)


def _inline_checkpoints(undo: list[Callable[[], None]]) -> None:
    """Let ``torch.utils.checkpoint`` just run its function, and label the nodes that are recorded in it."""
    number = count()

    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        with label_nodes(RECOMPUTED, [next(number)]):
            yield

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: Any, *args: Any) -> Any:
            with label_nodes(RECOMPUTED, [next(number)]):
                return function(*args)

    here: Any = torch.utils.checkpoint
    for name, replacement in (
        ("_checkpoint_without_reentrant_generator", generator),
        ("CheckpointFunction", Reentrant),
    ):
        undo.append(partial(setattr, here, name, getattr(here, name)))
        setattr(here, name, replacement)


@contextmanager
def label_nodes(key: str, value: Any) -> Iterator[None]:
    """Give the nodes that are recorded in the block a value in their ``meta``."""
    mode: Any = get_proxy_mode()
    root: Any = None if mode is None else mode.tracer.graph._root
    before = None if root is None else root.prev
    yield
    node: Any = None if root is None else root.prev
    while node is not before:
        node.meta.setdefault(key, value)
        node = node.prev


def _without_cache(modules: list[nn.Module], undo: list[Callable[[], None]]) -> list[str]:
    """Let models of transformers not return their keys and values, which no training reads."""
    found: list[Any] = [getattr(module, "config", None) for module in modules]
    configs = {id(config): config for config in found if getattr(config, "use_cache", False)}
    for config in configs.values():
        undo.append(partial(setattr, config, "use_cache", True))
        config.use_cache = False
    return ["keys and values (use_cache) are not among the outputs"] if configs else []


def forward_with_loss(model: nn.Module, loss: Callable[..., Tensor]) -> None:
    """Let ``model`` return its loss and its output; undone by ``fake_model``."""
    forward = model.forward

    def run(*args: Any, loss_targets: tuple[Any, ...] = (), **kwargs: Any) -> dict[str, Any]:
        output = forward(*args, **kwargs)
        return {"loss": loss(output, *loss_targets), "output": output}

    model.forward = run


def attribute(root: Any, path: str) -> Any:
    """``root.a.b`` for the path ``a.b``; ``root`` itself for an empty one."""
    return operator.attrgetter(path)(root) if path else root
