"""Any model as pipeline stages, of which each rank builds its own and nothing else.

Inside ``PipelinableContext`` a model is built without memory (see :mod:`colossalai.mesh.weights.deferred`).
``to_layer_list`` says in which order its layers run, ``partition`` chooses this rank's layers and gives just
these memory and values.  The values are those of the serial model, bit for bit, and so are the names: the
``state_dict`` of a stage is a part of the serial one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from colossalai.logging import get_dist_logger
from colossalai.mesh.weights.deferred import LARGE, Deferred
from colossalai.pipeline.calls import (
    Functions,
    build_kwargs_for_module,
    call_module,
    exec_funcs_with_kwargs,
)
from colossalai.pipeline.partition import (
    StageRanges,
    customized_partition,
    partition_balanced,
    partition_uniform,
)
from colossalai.pipeline.sequence import LayerStep, steps_of
from colossalai.pipeline.tied import check_shared_buffers, tie_stages


class LayerSpec:
    """``typename(*args, **kwargs)``, to be called by the rank that needs the layer; others only count its
    parameters.
    """

    def __init__(self, typename: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> None:
        if not callable(typename):
            raise TypeError(
                f"LayerSpec needs the class of a layer, or a function that builds it, got {typename!r}"
            )
        self.typename, self.args, self.kwargs = typename, args, kwargs
        self.children: tuple[LayerSpec, ...] = ()
        self._param_count: int | None = None

    def set_children(self, children: Sequence[LayerSpec]) -> None:
        """The specs of the layers inside: ``build`` passes what they build before the other arguments."""
        self.children = tuple(children)
        self.reset_param_count()

    def build(self) -> nn.Module:
        return self.typename(*(child.build() for child in self.children), *self.args, **self.kwargs)

    def count_params(self) -> int:
        """How many numbers the layer learns; it is built on the meta device, without memory."""
        with torch.device("meta"):
            self._param_count = sum(p.numel() for p in self.build().parameters())
        return self._param_count

    @property
    def param_count(self) -> int:
        return self.count_params() if self._param_count is None else self._param_count

    def reset_param_count(self) -> None:
        """Forget the count, after a change of the arguments."""
        self._param_count = None

    def __repr__(self) -> str:
        name = getattr(self.typename, "__name__", repr(self.typename))
        given = [*map(repr, (*self.children, *self.args)), *(f"{k}={v!r}" for k, v in self.kwargs.items())]
        return f"LayerSpec({', '.join([name, *given])})"


POLICIES = ("balanced", "uniform", "customized")


class PipelinableModel(nn.Module):
    """Layers that run one after the other, with functions before and after them.

    ``front_func_dict`` and ``behind_func_dict`` give the functions of a layer by its index in
    ``module_list``.  ``names`` are the layers' names in the whole model; without them they are numbered.
    """

    def __init__(
        self,
        module_list: Sequence[nn.Module],
        front_func_dict: Functions | None = None,
        behind_func_dict: Functions | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self._layers = tuple(module_list)
        self._front, self._behind = front_func_dict or {}, behind_func_dict or {}
        for name, module in zip(names or map(str, range(len(self._layers))), self._layers, strict=True):
            _attach(self, name, module)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """``inputs`` come from the stage before, or are the batch; ``kwargs`` are a batch that is a dict."""
        x = inputs[0] if len(inputs) == 1 else inputs or None
        for i, module in enumerate(self._layers):
            x = exec_funcs_with_kwargs(self._front, i, x, kwargs)
            x = call_module(module, x, build_kwargs_for_module(module, x, kwargs))
            x = exec_funcs_with_kwargs(self._behind, i, x, kwargs)
        return x


def _attach(model: nn.Module, name: str, module: nn.Module) -> None:
    """Make ``module`` the submodule ``name``, such as ``"layer1.0"``, of ``model``."""
    *folders, last = name.split(".")
    for folder in folders:
        if folder not in model._modules:
            model.add_module(folder, nn.Module())
        model = model.get_submodule(folder)
    if model._modules.get(last) is not module:
        model.add_module(last, module)


class PipelinableContext:
    """``with PipelinableContext() as pipelinable: model = ...``, then ``to_layer_list`` and ``partition``.

    ``policy`` says where the model is cut: ``"balanced"``, so that the largest stage is as small as possible;
    ``"uniform"``, into equally many layers; ``"customized"``, at each ``"SPLIT_NODE"`` of the ``exec_seq``.
    Tensors of fewer than ``large`` elements are built on every rank.
    """

    def __init__(self, policy: str = "balanced", large: int = LARGE) -> None:
        self.policy = policy
        self._recording = Deferred(large)
        self._made: list[nn.Module] = []
        self._model: nn.Module | None = None
        self._exec_seq: Sequence[Any] | None = None
        self._steps: list[LayerStep] | None = None
        self._parameters: list[dict[str, nn.Parameter]] = []
        self._plain_init: Callable[..., None] | None = None

    @property
    def policy(self) -> str:
        return self._policy

    @policy.setter
    def policy(self, policy: str) -> None:
        if policy not in POLICIES:
            raise ValueError(
                f"the policy of a PipelinableContext is one of {', '.join(POLICIES)}, got {policy!r}"
            )
        self._policy = policy

    @property
    def layers(self) -> list[LayerStep]:
        """The layers in the order in which they run, with the functions between them."""
        return self._listed()

    @property
    def layers_count(self) -> int:
        """How many layers there are to distribute."""
        return len(self._listed())

    @property
    def funcs_count(self) -> int:
        """How many functions there are between the layers."""
        return sum(len(step.front) + len(step.behind) for step in self._listed())

    def __enter__(self) -> PipelinableContext:
        if self._model is not None:
            raise RuntimeError(
                "this PipelinableContext has recorded a model; use a new one for another model"
            )
        self._plain_init = plain_init = nn.Module.__init__

        def recorded_init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            plain_init(module, *args, **kwargs)
            self._made.append(module)

        nn.Module.__init__ = recorded_init  # type: ignore[method-assign,assignment]
        self._recording.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._recording.__exit__(*details)
        assert self._plain_init is not None
        nn.Module.__init__ = self._plain_init  # type: ignore[method-assign]
        if details[0] is None:
            self._model = _outermost(self._made)
        self._made.clear()

    def to_layer_list(self, exec_seq: Sequence[Any] | None = None) -> None:
        """Say in which order the layers run, and what functions run between them (see ``steps_of``)."""
        if self._model is None:
            raise RuntimeError("build the model inside of the PipelinableContext before to_layer_list")
        self._exec_seq = exec_seq
        self._steps = steps_of(self._model, exec_seq)
        self._parameters = [dict(step.module.named_parameters()) for step in self._steps]
        used = {id(p) for parameters in self._parameters for p in parameters.values()}
        if lost := [name for name, p in self._model.named_parameters() if id(p) not in used]:
            get_dist_logger().warning(
                f"{len(lost)} parameters of {type(self._model).__name__} belong to no layer of the pipeline"
                f" and are left out: {', '.join(lost[:5])}",
                ranks=[0],
            )

    def partition(
        self,
        num_chunks: int = 1,
        pipeline_size: int = 1,
        rank: int = 0,
        *,
        costs: Sequence[float] | None = None,
    ) -> nn.Module:
        """The layers of pipeline rank ``rank``: a ``PipelinableModel``, or a ``ModuleList`` of one for each
        chunk.

        ``costs`` of the layers take the place of their numbers of parameters for the policy ``"balanced"``
        (see ``colossalai.pipeline.cost``).
        """
        steps = self._listed()
        parts = self._parts(num_chunks, pipeline_size, costs)
        if rank not in range(pipeline_size):
            raise ValueError(
                f"a pipeline of {pipeline_size} stages has the ranks 0 to {pipeline_size - 1}, got {rank!r}"
            )
        check_shared_buffers([step.module for step in steps], parts)
        chunks = [self._stage(steps[start:end]) for start, end in parts[rank]]
        model = chunks[0] if num_chunks == 1 else nn.ModuleList(chunks)
        self._recording.materialize(model)
        tie_stages([step.module for step in steps], self._parameters, parts, rank)
        return model

    def _listed(self) -> list[LayerStep]:
        if self._steps is None:
            self.to_layer_list()
        assert self._steps is not None
        return self._steps

    def _parts(self, num_chunks: int, pipeline_size: int, costs: Sequence[float] | None) -> StageRanges:
        if costs is not None and (self.policy != "balanced" or len(costs) != self.layers_count):
            raise ValueError(
                f"costs are for the policy 'balanced', one for each of {self.layers_count} layers; got"
                f" {len(costs)} for the policy {self.policy!r}"
            )
        if self.policy == "uniform":
            return partition_uniform(self.layers_count, pipeline_size, num_chunks)
        if self.policy == "customized":
            if self._exec_seq is None:
                raise ValueError(
                    "the policy 'customized' needs an exec_seq with 'SPLIT_NODE' in to_layer_list"
                )
            return customized_partition(self._exec_seq, pipeline_size, num_chunks)
        counts = [sum(p.numel() for p in layer.values()) for layer in self._parameters]
        return partition_balanced(counts if costs is None else costs, pipeline_size, num_chunks)

    def _stage(self, steps: Sequence[LayerStep]) -> PipelinableModel:
        front = {i: step.front for i, step in enumerate(steps)}
        behind = {i: step.behind for i, step in enumerate(steps)}
        return PipelinableModel(
            [step.module for step in steps], front, behind, names=[step.name for step in steps]
        )


def _outermost(made: list[nn.Module]) -> nn.Module:
    """The one module, among those with parameters, that is inside of no other; ``made`` is emptied."""
    inner = {id(child) for module in made for child in module.children()}
    outer = [m for m in made if id(m) not in inner and any(True for _ in m.parameters())]
    made.clear()
    if len(outer) > 1:
        # modules without another reference were intermediate, such as the pattern of copies
        alive = [weakref.ref(module) for module in outer]
        outer.clear()
        outer = [module for ref in alive if (module := ref()) is not None]
    if len(outer) != 1:
        names = ", ".join(type(module).__name__ for module in outer) or "none"
        raise RuntimeError(
            f"a PipelinableContext needs one model to be built inside, got {len(outer)}: {names}; build"
            " other modules outside of the block"
        )
    return outer[0]
