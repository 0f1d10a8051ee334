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
from colossalai.nn.policies.trials.meta_inputs import LENGTH, candidate_inputs, in_evaluation
from colossalai.nn.policies.trials.weightless_twin import weightless_twin
from colossalai.nn.policies.wrap_forward import argument_names

SEED, WORDS = 4321, 100
ADVICE = "pass policy=colossalai.nn.policies.Policy(...)"
# Models round to float32 inside (softmax, norms), so that float64 has no more digits to compare.
_ROUNDED = 1e-6


class Verification:
    """The outputs of a whole model for sequences of ``length``, to be compared with those of the model when
    it is cut.

    With ``weightless`` a copy with other weights is run, if there can be one.  With ``padded`` the last
    sequence is shorter, if the model takes a mask.
    """

    def __init__(
        self, model: nn.Module, length: int = LENGTH, *, weightless: bool = False, padded: bool = False
    ) -> None:
        self.model = model
        self.inputs: dict[str, Any] | None = None
        self.outputs: dict[str, Tensor] = {}
        twin = weightless_twin(model) if weightless else None
        for runs in (*([] if twin is None else [twin]), *([model] if has_numbers(model) else [])):
            for inputs in _inputs(runs, length):
                if padded and "input_ids" in inputs and "attention_mask" in argument_names(runs.forward):
                    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
                    inputs["attention_mask"][-1, length // 2 :] = 0
                try:
                    found = self.answers(runs, lambda: runs(**inputs))  # noqa: B023
                except Exception:  # other arguments may do
                    continue
                if runs is twin and not all(x.isfinite().all() for x in found.values()):
                    break
                self.model, self.inputs, self.outputs = runs, inputs, found
                return

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
            if not off <= max(torch.finfo(whole.dtype).eps ** 0.5, _ROUNDED):
                return f"its output {name!r} is off by {off:.1e} of its largest value"
        return ""

    def coupled(self) -> str | None:
        """The name of an output whose rows depend on the other rows of the batch; None if none does."""
        assert self.inputs is not None
        first = tree_map(lambda x: x[:1] if isinstance(x, Tensor) else x, self.inputs)
        alone = self.answers(self.model, lambda: self.model(**first))
        for name, whole in self.outputs.items():
            own = alone.get(name)
            if (
                own is not None
                and whole.ndim
                and len(whole) > len(own) == 1
                and own.shape[1:] != whole.shape[1:]
            ):
                return name
        return None

    def compare(self, model: nn.Module, advice: str) -> None:
        """Refuse a cut ``model`` whose outputs are others; every rank of the job must call this."""
        if self.inputs is None or not dist.is_initialized() or dist.get_backend() == "fake":
            return
        inputs = self.inputs
        everyone: list[Any] = [None] * dist.get_world_size()
        try:
            words = self.difference(self.answers(model, lambda: model(**inputs)))
        except Exception as error:
            words = f"its forward fails with {type(error).__name__}: {error}"
        dist.all_gather_object(everyone, words)
        found = next(((rank, words) for rank, words in enumerate(everyone) if words), None)
        if found is not None:
            raise RuntimeError(
                f"{type(model).__name__}, cut by parallelize, does not compute what the whole model does: on"
                f" rank {found[0]} {found[1]}. This model is unusable now; build it again, and {advice}"
            )


def has_numbers(model: nn.Module) -> bool:
    return all(not t.is_meta and has_values(t) for t in (*model.parameters(), *model.buffers()))


def _inputs(model: nn.Module, length: int) -> Iterator[dict[str, Any]]:
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
        for inputs in candidate_inputs(model, length=length):
            if "output_attentions" not in inputs:
                yield tree_map(filled, inputs)
