"""Modules with ColoTensors: finding them, making them, and states of whole tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from colossalai.mesh import shard, unshard
from colossalai.tensor.colo_parameter import ColoParameter
from colossalai.tensor.colo_tensor import ColoTensor, cut_dim
from colossalai.tensor.tensor_spec import ColoTensorSpec


def named_params_with_colotensor(
    module: nn.Module, prefix: str = "", recurse: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """``module.named_parameters()``, and the ColoTensors that modules keep as ordinary attributes; each
    once.
    """
    seen: set[int] = set()
    for path, owner in module.named_modules(prefix=prefix) if recurse else [(prefix, module)]:
        attributes = {n: t for n, t in vars(owner).items() if isinstance(t, ColoTensor)}
        for name, tensor in {**owner._parameters, **attributes}.items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{path}.{name}" if path else name, tensor


def convert_parameter(
    module: nn.Module, param_name: str, spec: ColoTensorSpec | None = None
) -> ColoParameter:
    """Put a ColoParameter with the same memory in the place of the parameter ``param_name`` of ``module``.

    With a ``spec`` that cuts, the parameter is taken to be this rank's piece.
    """
    param = module._parameters.get(param_name)
    if param is None:
        names = ", ".join(n for n, p in module._parameters.items() if p is not None)
        raise ValueError(f"{type(module).__name__} has no parameter {param_name!r}; it has {names or 'none'}")
    new = ColoParameter(param, param.requires_grad, spec)
    module._parameters[param_name] = new
    return new


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """``model.state_dict()`` of whole plain tensors: that of the serial model.  Every tp rank must call it.

    As in ``state_dict``, what is whole already shares the memory of the model.
    """
    state = model.state_dict()
    return {name: _whole(value) for name, value in state.items()}


def _whole(value: Any) -> Any:
    if not isinstance(value, ColoTensor):
        return value
    return unshard(value.data, value.placement, value.process_group.mesh)


def load_full_state_dict(model: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
    """``model.load_state_dict`` with whole tensors, of which each rank takes its pieces; no communication."""
    targets = dict(model.state_dict(keep_vars=True))
    pieces = {}
    for name, value in state_dict.items():
        target = targets.get(name)
        if cut_dim(target) is not None and isinstance(value, Tensor) and not isinstance(value, ColoTensor):
            assert isinstance(target, ColoTensor)
            if value.shape != target.full_shape:
                raise ValueError(
                    f"load_full_state_dict takes whole tensors: {name!r} has shape {tuple(value.shape)} and"
                    f" must have {tuple(target.full_shape)}"
                )
            value = shard(value, target.placement, target.process_group.mesh)
        pieces[name] = value
    return model.load_state_dict(pieces, strict=strict)
