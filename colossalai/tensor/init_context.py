"""``ColoInitContext``: the parameters of every model that is built inside the block become ColoParameters.

They become so at the end of the block, from the values that the ordinary constructors gave them.  So a model
begins with the weights of the serial model, bit for bit, whatever its process group, dist spec, device and
dtype; constructors that change the weights of their children afterwards, tie them, or load them from a file
need no care.  Inside the block large tensors have no memory (``mesh.weights.deferred``); at its end
each is computed, cut and forgotten before the next one.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.mesh import shard
from colossalai.mesh.weights.deferred import Deferred, fill_beside_parameters, paused, recording_of
from colossalai.tensor.colo_parameter import ColoParameter
from colossalai.tensor.distspec import DistSpec, ReplicaSpec, layout_of
from colossalai.tensor.process_group import JobProcessGroup, ProcessGroup
from colossalai.tensor.tensor_spec import ColoTensorSpec

Device = torch.device | str | int


class ColoInitContext:
    """Build models of ColoParameters.

    Args:
        device: where parameters and buffers go.
        dtype: of floating-point parameters.
        default_pg: the process group of all parameters, by default every rank of the job with
            ``tp_degree=1``; the job may be launched later.
        default_dist_spec: how all parameters lie, by default whole on every rank.
    """

    def __init__(
        self,
        device: Device = "cpu",
        dtype: torch.dtype = torch.float,
        default_pg: ProcessGroup | None = None,
        default_dist_spec: DistSpec | None = None,
    ) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self.default_pg = default_pg or JobProcessGroup()
        self.default_dist_spec = default_dist_spec or ReplicaSpec()
        self._built: list[nn.Module] = []
        self._recording = Deferred()

    def __enter__(self) -> ColoInitContext:
        original, built = nn.Module.__init__, self._built

        def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            built.append(module)
            original(module, *args, **kwargs)

        self._original = original
        nn.Module.__init__ = init  # type: ignore[method-assign, assignment]
        self._recording.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recording.__exit__(kind, error, trace)
        nn.Module.__init__ = self._original  # type: ignore[method-assign]
        built, self._built = self._built, []
        if kind is None:
            inner = {id(child) for module in built for child in module.children()}
            roots = [module for module in built if id(module) not in inner]
            with paused():  # the blocks around this one
                _convert(roots, self.device, self.dtype, self.default_pg, self.default_dist_spec)


def post_process_colo_init_ctx(
    model: nn.Module,
    device: Device = "cpu",
    dtype: torch.dtype = torch.float,
    default_pg: ProcessGroup | None = None,
    default_dist_spec: DistSpec | None = None,
) -> None:
    """Turn the parameters of a model that exists into ColoParameters, as ``ColoInitContext`` does.

    Parameters that are ColoParameters already stay as they are; tied ones stay tied.
    """
    _convert(
        [model],
        torch.device(device),
        dtype,
        default_pg or JobProcessGroup(),
        default_dist_spec or ReplicaSpec(),
    )


def _convert(
    models: list[nn.Module], device: torch.device, dtype: torch.dtype, pg: ProcessGroup, dist_spec: DistSpec
) -> None:
    for model in models:  # all checks come before any change
        for name, param in model.named_parameters():
            if not isinstance(param, ColoParameter):
                try:
                    layout_of(dist_spec, param.shape, pg, whole=True)
                except ValueError as problem:
                    raise ValueError(f"parameter {name!r} of {type(model).__name__}: {problem}") from None
    for model in models:
        fill_beside_parameters(model)
    # the old ones are kept until all is done, or their ids would be given to others
    done: dict[int, tuple[Tensor, ColoParameter]] = {}
    for module in {id(m): m for model in models for m in model.modules()}.values():
        for name, old in module._parameters.items():
            if old is None or isinstance(old, ColoParameter):
                continue
            if id(old) not in done:
                done[id(old)] = old, _converted(old, device, dtype, pg, dist_spec)
            module._parameters[name] = done[id(old)][1]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def _converted(
    param: nn.Parameter, device: torch.device, dtype: torch.dtype, pg: ProcessGroup, dist_spec: DistSpec
) -> ColoParameter:
    layout = layout_of(dist_spec, param.shape, pg, whole=True)
    recording = recording_of(param)
    data = param.detach() if recording is None else recording.values(param)
    piece = shard(data, layout, pg.mesh) if layout.sharded else data
    piece = piece.to(device, dtype if param.is_floating_point() else None)
    new = ColoParameter(piece, param.requires_grad, ColoTensorSpec(pg, dist_spec))
    for key, value in param.__dict__.items():  # what users keep there
        new.__dict__.setdefault(key, value)
    return new
