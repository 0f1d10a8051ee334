"""The module of a rank that holds one stage of a pipeline or several, and how a stage is called."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from typing import Any

from torch import nn

from colossalai.interface import ModelWrapper
from colossalai.nn.policies.stages.stage import ModelStage, StageList
from colossalai.pipeline.stage import own_stage

_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class ModelChunks(StageList):
    """Several stages as one module, so that wrappers (mixed precision) go around all of them at once.

    Parameters keep the names they have in the list that is given.
    """

    def forward(self, *args: Any, pipeline_chunk: int, **kwargs: Any) -> Any:
        return self[pipeline_chunk](*args, **kwargs)

    def virtual_stage(self, name: str) -> int:
        """The virtual stage of what is ``name`` here, for checkpoints: its place in the whole model."""
        return own_stage(int(name.partition(".")[0]), len(self))


def with_chunks(model: nn.Module) -> nn.Module:
    """``model``, or if it is a plain list of stages, one module of them that can be called."""
    if isinstance(model, nn.ModuleList) and not isinstance(model, ModelChunks):
        return ModelChunks(model)
    return model


def _innermost(model: nn.Module) -> nn.Module:
    return model.unwrap() if isinstance(model, ModelWrapper) else model


def count_chunks(model: nn.Module) -> int:
    inner = _innermost(model)
    return len(inner) if isinstance(inner, ModelChunks) else 1


def _parameters(stage: nn.Module) -> list[inspect.Parameter]:
    own = inspect.signature(stage.forward).parameters.values()
    if not isinstance(stage, ModelStage):
        return list(own)
    # the signature is the model's; what a stage of it receives goes before
    return [inspect.Parameter("received", inspect.Parameter.VAR_POSITIONAL), *own]


class StageCaller:
    """Calls the stages of ``model``, boosted or not.

    A stage gets what the stage before returned: a dict as keywords, a tuple or list as arguments if it takes
    as many, else one argument.  If the data are a dict, every stage also gets the keywords that it has a name
    for, and that are not filled by what the stage before returned; if not, they go to the first stage alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        inner = _innermost(model)
        self._is_list = isinstance(inner, ModelChunks)
        stages = list(inner) if isinstance(inner, ModelChunks) else [inner]
        self._signatures = [_parameters(_innermost(stage)) for stage in stages]

    def __call__(self, chunk: int, data: Any, received: Any, *, is_first: bool) -> Any:
        args, keywords = self._arguments(chunk, data if is_first else received)
        if isinstance(data, Mapping):
            filled = self._filled(chunk, len(args))
            accepted = self._accepted(chunk, data)
            keywords = {name: value for name, value in accepted.items() if name not in filled} | keywords
        if self._is_list:
            keywords["pipeline_chunk"] = chunk
        return self.model(*args, **keywords)

    def _arguments(self, chunk: int, nest: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(nest, Mapping):
            return (), self._accepted(chunk, nest)
        if isinstance(nest, (tuple, list)) and self._takes(chunk, len(nest)):
            return tuple(nest), {}
        return (nest,), {}

    def _takes(self, chunk: int, number: int) -> bool:
        kinds = [parameter.kind for parameter in self._signatures[chunk]]
        many = inspect.Parameter.VAR_POSITIONAL in kinds
        return many or sum(kind in _BY_PLACE for kind in kinds) >= number

    def _filled(self, chunk: int, number: int) -> set[str]:
        """The names of the parameters that ``number`` arguments fill."""
        by_place = itertools.takewhile(lambda p: p.kind in _BY_PLACE, self._signatures[chunk])
        return {parameter.name for parameter in itertools.islice(by_place, number)}

    def _accepted(self, chunk: int, keywords: Mapping[str, Any]) -> dict[str, Any]:
        parameters = self._signatures[chunk]
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            return dict(keywords)
        names = {parameter.name for parameter in parameters}
        return {name: value for name, value in keywords.items() if name in names}
