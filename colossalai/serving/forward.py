"""The program of ranks that run a model forward: any ``model_fn``, cut as the job was launched.

Every rank gets every batch, in the same order.  In a pipeline each stage computes on what the stage before it
sends; the last one answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.nn.policies.stages.stage import ModelStage
from colossalai.serving.generation import HEARTBEAT
from colossalai.serving.loading import cut
from colossalai.serving.wire import pack, unpack
from colossalai.serving.worker import EVENTS, STOP, ServiceLink
from colossalai.utils import get_current_device

_OF_THE_REQUEST = (
    ValueError,
    TypeError,
    RuntimeError,
    IndexError,
    KeyError,
    AssertionError,
    NotImplementedError,
)


class BatchForward:
    """Run batches through this rank's part of a model.

    What ``model_fn(**model_kwargs)`` returns may be cut already, by the launched job; else it is cut here as
    ``colossalai.nn.parallelize`` and ``colossalai.pipeline.split_model`` do it.  A tuple or list is given to
    the model as arguments, a mapping as keywords, anything else as its one argument.
    """

    def __init__(self, model_fn: Callable[..., nn.Module], model_kwargs: Mapping[str, Any]) -> None:
        model = model_fn(**model_kwargs)
        if not isinstance(model, nn.Module):
            raise TypeError(f"model_fn must return an nn.Module, got {type(model).__name__}")
        several = gpc.tensor_parallel_size * gpc.pipeline_parallel_size > 1
        if several and not _is_cut(model):
            model = cut(model)
        config: Any = getattr(model, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # nobody could use a cache that is sent away
        self._model: Any = model.to(get_current_device()).eval()
        self._first = gpc.is_first_rank(ParallelMode.PIPELINE) if gpc.pipeline_parallel_size > 1 else True
        self._last = gpc.is_last_rank(ParallelMode.PIPELINE) if gpc.pipeline_parallel_size > 1 else True

    def run(self, link: ServiceLink) -> None:
        with torch.inference_mode():
            while True:
                for kind, value in link.take(HEARTBEAT):
                    if kind == STOP:
                        return
                    if kind == "forward":
                        self._answer(link, *value)

    def _answer(self, link: ServiceLink, uid: int, data: Any) -> None:
        together = _generates(self._model, data)
        answers = link.rank == 0 if together else self._answers
        result = self._generate(data) if together else self._forward(data)
        if answers:
            link.send(EVENTS, [[uid, result, True]])

    @property
    def _answers(self) -> bool:
        return self._last and (gpc.tensor_parallel_size == 1 or gpc.is_first_rank(ParallelMode.TENSOR))

    def _generate(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """All ranks write together."""
        try:
            return {"output": self._model.generate_batch(**_placed(data))}
        except (ValueError, TypeError) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def _forward(self, data: Any) -> dict[str, Any]:
        """What the last stage returned, or what went wrong in any; the same on no other rank."""
        result: dict[str, Any]
        received = () if self._first else _receive()
        if isinstance(received, dict):  # an earlier stage has failed
            result = received
        else:
            try:
                output = _plain(self._call(data, received))
                pack(output)  # refuses what cannot be sent
                result = {"output": output}
            except _OF_THE_REQUEST as error:
                result = {"error": f"{type(error).__name__}: {error}"}
        if not self._last:
            _send(result if "error" in result else (result["output"],))
        return result

    def _call(self, data: Any, received: tuple[Any, ...]) -> Any:
        data, received = _placed(data), _placed(received)
        if isinstance(data, Mapping):
            return self._model(*received, **data)
        if received:  # the batch was for the first stage
            inner = received[0]
            return self._model(*inner) if isinstance(inner, tuple) else self._model(inner)
        return self._model(*data) if isinstance(data, (tuple, list)) else self._model(data)


def _is_cut(model: nn.Module) -> bool:
    placed = any(getattr(parameter, "placement", None) is not None for parameter in model.parameters())
    return placed or any(isinstance(module, ModelStage) for module in model.modules())


def _generates(model: nn.Module, data: Any) -> bool:
    return isinstance(data, Mapping) and "max_tokens" in data and hasattr(model, "generate_batch")


def _placed(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(get_current_device())
    if isinstance(value, Mapping):
        return {key: _placed(one) for key, one in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_placed(one) for one in value)
    return value


def _plain(value: Any) -> Any:
    """Outputs of models as dicts, tuples and lists."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items() if one is not None}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return tuple(_plain(one) for one in value)
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value


def _send(value: Any) -> None:
    text, *rest = pack(value)
    data = b"".join([len(text).to_bytes(8, "big"), text, *rest])
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(get_current_device())
    target = gpc.get_next_global_rank(ParallelMode.PIPELINE)
    group = gpc.get_group(ParallelMode.PIPELINE)
    dist.send(torch.tensor([len(tensor)], device=tensor.device), target, group)
    dist.send(tensor, target, group)


def _receive() -> Any:
    source, group = gpc.get_prev_global_rank(ParallelMode.PIPELINE), gpc.get_group(ParallelMode.PIPELINE)
    size = torch.zeros(1, dtype=torch.int64, device=get_current_device())
    dist.recv(size, source, group)
    tensor = torch.empty(int(size), dtype=torch.uint8, device=size.device)
    dist.recv(tensor, source, group)
    data = memoryview(tensor.cpu().numpy().data)
    end = 8 + int.from_bytes(data[:8], "big")
    return unpack(data[8:end], data[end:])
