"""Modules that stay one node of a graph: those that a caller names, and those whose code asks for values.

``ModuleCalls`` follows which module runs while a graph is recorded.  A node knows its module by it, a failure
too, and a module that is to be a leaf is recorded as a call.
"""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import PythonKeyTracer, get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from colossalai.fx.functions import AsksForGradients, record_call

MODULE = "module"
"""The key of a node's meta under which the path of its module lies."""

ROOT = "whole_model"
"""The name of the one node of a graph whose model is a leaf itself."""

_READS = 10_000  # a loop that waits for a value would read for ever


@dataclass(frozen=True)
class LeafModule:
    """A module that is one node of a graph, and why.

    Args:
        path: its name in the model, empty for the model itself.
        reason: what went wrong inside it, or that it was asked for.
        line: file, number and text of the line of its code where that was; empty if it was asked for.
    """

    path: str
    reason: str
    line: str = ""

    def __str__(self) -> str:
        return f"{self.path or 'the model'}: {self.reason}" + (f" ({self.line})" if self.line else "")


class ValuesAsZero(TorchDispatchMode):
    """Lets code that asks fake tensors for values run: a number is 0, a condition False, and of elements
    that are chosen by their values all are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is aten._local_scalar_dense.default:
            self.reads += 1
            if self.reads > _READS:
                raise RuntimeError(f"code that waits for a value has read {_READS} of them")
            return False if args[0].dtype is torch.bool else 0
        if func in (aten.nonzero.default, aten.masked_select.default):
            size = (args[0].numel(), args[0].ndim) if func is aten.nonzero.default else (args[0].numel(),)
            return args[0].new_empty(size, dtype=torch.long if len(size) == 2 else args[0].dtype)
        if func is aten.index.Tensor and any(i is not None and i.dtype is torch.bool for i in args[1]):
            return func(args[0], _places(args[1]))
        return func(*args, **(kwargs or {}))


def _places(indices: Collection[Tensor | None]) -> list[Tensor | None]:
    """Indices without masks: a mask chooses each of its elements, by one index for each of its dims."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype is torch.bool:
            place = index.new_empty((index.numel(),), dtype=torch.long)
            found += [place] * index.ndim
        else:
            found.append(index)
    return found


@contextmanager
def no_gradients_beyond(tensors: Any, error: Callable[[], Exception]) -> Iterator[None]:
    """Within the block, a backward pass that goes on beyond ``tensors`` raises ``error()``.

    These are what a leaf takes, of which it may ask gradients; what they were computed from is not its
    affair: other operations of a graph, with parts of a gradient on each rank of a plan.
    """

    def refuse(_: Any) -> None:
        raise error()

    made = {x.grad_fn for x in tree_leaves(tensors) if isinstance(x, Tensor) and x.grad_fn is not None}
    with ExitStack() as hooks:
        for function in made:  # autograd calls these hooks only where it goes through the function
            hooks.callback(function.register_prehook(refuse).remove)
        yield


@contextmanager
def no_hooks_on(tensors: Any, error: Callable[[], Exception]) -> Iterator[None]:
    """At the end of the block, raise ``error()`` if code in it has put a hook on one of ``tensors``.

    The hook would see the gradient of what a leaf takes, to which other operations add their parts.
    """
    own = [x for x in tree_leaves(tensors) if isinstance(x, Tensor)]
    before = [len(x._backward_hooks or ()) for x in own]
    yield
    if before != [len(x._backward_hooks or ()) for x in own]:
        raise error()


def run_leaf(path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Call ``module`` on fake tensors; where it asks for values, it is given zeros."""

    def beyond() -> Exception:
        return AsksForGradients(f"{path} asks for gradients (torch.autograd.grad) of what others have made")

    def hooked() -> Exception:
        return AsksForGradients(f"{path} puts a hook on the gradient of a tensor that others have made")

    given = args, kwargs
    with ValuesAsZero(), no_gradients_beyond(given, beyond), no_hooks_on(given, hooked):
        return module(*args, **kwargs)


@fx.node.has_side_effect
def leaf_call(path: str, *args: Any, **kwargs: Any) -> Any:
    """Stands for a leaf while torch records, which knows no calls of modules; ``as_modules`` makes them."""
    raise RuntimeError(f"leaf {path} was not made a call of a module")


def as_modules(graph: fx.Graph) -> None:
    """Let leaves be ``call_module`` nodes."""
    for node in graph.find_nodes(op="call_function", target=leaf_call):
        with graph.inserting_before(node):
            name = str(node.args[0]).replace(".", "_")
            call = graph.create_node("call_module", node.args[0], node.args[1:], node.kwargs, name)
        call.meta.update(node.meta)
        node.replace_all_uses_with(call)
        graph.erase_node(node)


class ModuleCalls:
    """Within the block, follows the calls of the modules of ``model`` while make_fx records.

    Args:
        leaves: paths of modules to be recorded as one call.
        outputs: what the next call of a leaf returns, or None if it shall run.
    """

    def __init__(
        self, model: nn.Module, leaves: Collection[str], outputs: Callable[[str], Any] = lambda path: None
    ) -> None:
        self._paths = {id(module): path for path, module in reversed(list(model.named_modules()))}
        self._leaves, self._outputs = leaves, outputs
        self.failed: str | None = None
        """The innermost module in which an error arose that nothing has caught."""
        self.modules: dict[Any, str] = {}
        """Node -> path of its module."""

    def __enter__(self) -> ModuleCalls:
        calls = self

        def call_module(tracer: Any, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
            return calls._call(tracer, module, forward, args, kwargs)

        # its tracer is asked about every call of a module
        self._before = PythonKeyTracer.call_module
        PythonKeyTracer.call_module = call_module  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *error: Any) -> None:
        PythonKeyTracer.call_module = self._before  # type: ignore[method-assign]

    def _call(self, tracer: Any, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        path = self._paths.get(id(module))
        if path is None or get_proxy_mode() is None:
            return forward(*args, **kwargs)
        graph = tracer.graph
        before = graph._root.prev
        try:
            if path in self._leaves:
                result = self._record(tracer, path, module, args, kwargs)
            else:
                result = forward(*args, **kwargs)
        except Exception:
            self.failed = path if self.failed is None else self.failed
            raise
        self.failed = None
        node = graph._root.prev
        while node is not before:  # what has a module already is that of a module inside this one
            self.modules.setdefault(node, path)
            node = node.prev
        return result

    def _record(self, tracer: Any, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        def run() -> Any:
            result = self._outputs(path)
            return run_leaf(path, module, args, kwargs) if result is None else result

        return record_call(tracer, leaf_call, (path or ROOT, *args), kwargs, run)


def same_code(model: nn.Module, path: str) -> list[str]:
    """The modules of ``model`` whose code is that of the module at ``path``, itself included."""
    code = type(model.get_submodule(path))
    return [name for name, module in model.named_modules() if type(module) is code]


def failing_line(error: BaseException) -> str:
    """The innermost line of an error's traceback that is neither torch's nor ours: ``file:line: text``."""
    here = Path(__file__).parent
    ours = (str(Path(torch.__file__).parent), str(here), str(here.parent / "auto_parallel"))
    found = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith((*ours, "<")) and "contextlib" not in file:
            found = f"{file}:{number}: {linecache.getline(file, number).strip()}"
    return found


LeafChoice = Callable[[str, nn.Module], bool]
