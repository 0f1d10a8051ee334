"""Compares the outputs of a model before and after it was cut, once, on a few random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
        self.outputs: dict[str, Tensor] = {}
        for inputs in _inputs(model) if _has_numbers(model) else ():
            try:
                self.outputs = self.answers(model, lambda inputs=inputs: model(**inputs))  # type: ignore[misc]
            except Exception:  # other arguments may do
                continue
            self.inputs = inputs
            break

    @property
    def possible(self) -> bool:
        """Whether the whole model could be run."""
        return self.inputs is not None

    def answers(self, model: nn.Module, run: Callable[[], Any]) -> dict[str, Tensor]:
        """Floating-point outputs of ``run``, in the evaluation mode of ``model`` and with fixed numbers."""
        devices = sorted({p.device.index for p in model.parameters() if p.is_cuda})
        with without_modes(), torch.random.fork_rng(devices=devices), torch.no_grad(), in_evaluation(model):
            torch.manual_seed(SEED)
            found = run()
        named = found if isinstance(found, Mapping) else {str(i): x for i, x in enumerate(tree_leaves(found))}
        return {
            name: x.detach().clone()
            for name, x in named.items()
            if isinstance(x, Tensor) and x.is_floating_point()
        }

    def difference(self, answers: Mapping[str, Tensor]) -> str:
        """What is wrong with the outputs of the cut model, in words; nothing if they are those of the whole
        one.
        """
        for place, (name, whole) in enumerate(self.outputs.items()):
            own = answers.get(name)
            if own is None and place:
                continue  # of the states of an encoder, a later stage has none
            if own is None or own.shape != whole.shape:
                got = "missing" if own is None else f"of shape {tuple(own.shape)}"
                return f"its output {name!r} is {got}, not of shape {tuple(whole.shape)}"
            off = (
                float((own - whole).abs().max() / whole.abs().max().clamp(min=1e-30)) if own.numel() else 0.0
            )
            if not off <= torch.finfo(whole.dtype).eps ** 0.5:
                return f"its output {name!r} is off by {off:.1e} of its largest value"
        return ""

    def compare(self, model: nn.Module) -> None:
        """Refuse a cut ``model`` whose outputs are others; every rank of the job must call this."""
        if self.inputs is None or not dist.is_initialized() or dist.get_backend() == "fake":
            return
        inputs = self.inputs
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.difference(self.answers(model, lambda: model(**inputs))))
        found = next(((rank, words) for rank, words in enumerate(everyone) if words), None)
        if found is not None:
            raise RuntimeError(
                f"{type(model).__name__}, cut by parallelize, does not compute what the whole model does: on"
                f" rank {found[0]} {found[1]}. This model is unusable now; build it again, and pass"
                " policy=colossalai.nn.policies.Policy(...)"
            )


def _has_numbers(model: nn.Module) -> bool:
    return all(not t.is_meta and has_values(t) for t in (*model.parameters(), *model.buffers()))


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
