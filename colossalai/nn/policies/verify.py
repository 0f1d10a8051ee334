"""Compares the outputs of a model before and after it was cut, once, on a few random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from colossalai.mesh._compat import without_modes
from colossalai.mesh.parameter import has_values
from colossalai.nn.policies.meta_inputs import candidate_inputs, in_evaluation

SEED, WORDS = 4321, 100


class Verification:
    """The outputs of a whole model, to be compared with those of the model when it is cut."""

    def __init__(self, model: nn.Module) -> None:
        self.inputs: dict[str, Any] | None = None
        self.outputs: list[Tensor] = []
        if not _can_run(model):
            return
        for inputs in _inputs(model):
            try:
                self.outputs = _answers(model, inputs)
            except Exception:  # other arguments may do
                continue
            self.inputs = inputs
            break

    @property
    def possible(self) -> bool:
        """Whether the whole model could be run."""
        return self.inputs is not None

    def compare(self, model: nn.Module) -> None:
        """Refuse a cut ``model`` whose outputs are others; every rank that shares it must call this."""
        if self.inputs is None:
            return
        answers = _answers(model, self.inputs)
        problem = ""
        for own, whole in zip(answers, self.outputs, strict=True):
            if own.shape != whole.shape:
                problem = f"an output has the shape {tuple(own.shape)} instead of {tuple(whole.shape)}"
                break
            off = (
                float((own - whole).abs().max() / whole.abs().max().clamp(min=1e-30)) if own.numel() else 0.0
            )
            if off > torch.finfo(whole.dtype).eps ** 0.5:
                problem = f"an output of shape {tuple(whole.shape)} is off by {off:.1e} of its largest value"
                break
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, problem)
        found = next(((rank, words) for rank, words in enumerate(everyone) if words), None)
        if found is not None:
            raise RuntimeError(
                f"{type(model).__name__}, cut by parallelize, does not compute what the whole model does;"
                f" on rank {found[0]} {found[1]}. This model is unusable now; build it again, and pass"
                " policy=colossalai.nn.policies.Policy(...)"
            )


def _can_run(model: nn.Module) -> bool:
    tensors = [*model.parameters(), *model.buffers()]
    real = all(not t.is_meta and has_values(t) for t in tensors)
    return real and dist.is_initialized() and dist.get_backend() != "fake"


def _inputs(model: nn.Module) -> Iterator[dict[str, Any]]:
    config: Any = getattr(model, "config", None)
    text = getattr(config, "text_config", config)
    words = min(getattr(text, "vocab_size", None) or WORDS, WORDS)

    def filled(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        random = torch.Generator().manual_seed(SEED)
        if x.is_floating_point():
            return torch.randn(x.shape, generator=random, device="cpu").to(x)
        return torch.randint(words, x.shape, generator=random, device="cpu").to(x)

    with next((p.device for p in model.parameters()), torch.device("cpu")):
        for inputs in candidate_inputs(model):
            if "output_attentions" not in inputs:
                yield tree_map(filled, inputs)


def _answers(model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    devices = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    with without_modes(), torch.random.fork_rng(devices=devices), torch.no_grad(), in_evaluation(model):
        torch.manual_seed(SEED)
        found = model(**inputs)
    return [x.detach().clone() for x in tree_leaves(found) if isinstance(x, Tensor) and x.is_floating_point()]
