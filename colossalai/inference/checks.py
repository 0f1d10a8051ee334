"""What cannot generate, refused in words before anything is changed or sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from colossalai.inference.requests import Sampling
from colossalai.inference.runner import head_of, vocabulary_of
from colossalai.mesh import Mesh
from colossalai.mesh.rows import sequence_axes
from colossalai.nn.modes import current
from colossalai.nn.policies.stages.stage import ModelStage
from colossalai.nn.policies.wrap_forward import WholeOutputs
from colossalai.zero.absent_tensors import Away

NO_HEAD = (
    "has no head that scores words (get_output_embeddings() is None); build it with one, such as"
    " AutoModelForCausalLM"
)

# Rotations that depend on the longest sequence of a step.
_STEP_ROTATIONS = ("dynamic", "longrope")


def check_module(model: object) -> None:
    """Refuse what is no model with weights."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"Generator takes a model, got {type(model).__name__} {model!r:.60};"
            " colossalai.inference.load_model reads one from a folder"
        )
    if isinstance(model, nn.DataParallel):
        raise ValueError("Generator takes the model in a DataParallel: give its .module")
    if next(model.parameters(), None) is None:
        raise ValueError(f"{type(model).__name__} has no weights, and so nothing to generate with")


def check_model(model: nn.Module, mesh: Mesh | None) -> None:
    """Refuse a ``model`` that cannot generate, or not under its plan."""
    who = type(model).__name__
    if isinstance(model, nn.ModuleList):
        raise ValueError(
            f"{who}: this rank holds {len(model)} stages of a pipeline, and generation walks through one of"
            " each rank; split the model with a schedule of one chunk"
        )
    _check_weights(who, model)
    _check_plan(who, model, mesh)
    config: Any = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{who} has an encoder and a decoder, and Generator writes with a decoder alone")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"{who} has quantized weights (config.quantization_config), which Generator does not serve; load"
            " it without quantization"
        )
    _check_steps(who, getattr(config, "text_config", config))
    if not isinstance(model, ModelStage) and head_of(model) is None:
        raise ValueError(f"{who} {NO_HEAD}")


def _check_steps(who: str, config: Any) -> None:
    """Refuse what is computed from all tokens of a step, which are those of many requests; a short trial does
    not see it.
    """
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        raise ValueError(
            f"{who}: some of its layers have linear attention (config.layer_types), whose state is not keys"
            " and values of tokens; Generator does not serve it"
        )
    for kind in _rotations(config):
        if kind in _STEP_ROTATIONS:
            raise ValueError(
                f"{who}: its rotations ({kind!r}) depend on the longest sequence of a step, so a request"
                " would change others; set config.rope_parameters to another rope_type"
            )
    if getattr(config, "attn_temperature_tuning", None) and 0 in getattr(config, "no_rope_layers", ()):
        raise ValueError(
            f"{who}: it scales its queries by the number of tokens before them in a step"
            " (config.attn_temperature_tuning), so a request would change others; Generator does not serve it"
        )


def _rotations(config: Any) -> list[Any]:
    """The kinds of rotations of all layers; some configs have one for each kind of layer."""
    found = getattr(config, "rope_parameters", None) or {}
    each = [found, *(part for part in found.values() if isinstance(part, Mapping))]
    return [part.get("rope_type") for part in each]


def _check_weights(who: str, model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if isinstance(param, (Away, DTensor)):
            raise ValueError(
                f"{who}: the weight {name} lies in pieces (FSDP) or chunks (Gemini); give Generator the model"
                " that boost returned, which brings them together"
            )
        if param.is_meta:
            raise ValueError(
                f"{who}: the weight {name} has no memory yet; fill the model first"
                " (colossalai.checkpoint_io.load_pretrained, LazyInitContext.materialize, or boost)"
            )

    places = sorted({str(param.device) for param in model.parameters()})
    if len(places) > 1:
        raise ValueError(
            f"{who} has weights on {', '.join(places)} (a device_map of accelerate?); Generator wants those"
            " of a rank on one device: load it without device_map, and cut it over ranks (tensor, pipeline)"
        )


def _check_plan(who: str, model: Any, mesh: Mesh | None) -> None:
    tp = model.cut_as[0] if isinstance(model, WholeOutputs) else current().tp
    if tp.hidden.sharded:
        raise ValueError(
            f"{who} is cut in mode {tp.mode!r}, in which ranks hold pieces of the residual stream; Generator"
            " serves mode '1d' and pipelines: launch with parallel=dict(tensor=dict(size=..., mode='1d'))"
        )
    if mesh is not None and any(mesh.size[axis] > 1 for axis in sequence_axes(mesh)):
        raise ValueError(
            f"{who}: its sequences are cut over ranks (parallel.sequence), and a request that writes has one"
            " token at a time; launch without parallel.sequence to generate"
        )


def check_sizes(**sizes: int | None) -> None:
    """Refuse sizes of a generator that are no whole numbers above 0."""
    for name, value in sizes.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"Generator({name}={value!r}): it is a whole number of at least 1")
    if sizes.get("max_length") == 1:
        raise ValueError("Generator(max_length=1): a prompt and what follows it are two tokens at least")


def check_request(
    tokens: Sequence[int], sampling: Sampling, *, model: nn.Module, max_length: int, capacity: int
) -> None:
    """Refuse a request that can never be served."""
    _check_words(tokens, sampling, vocabulary_of(model))
    room = 1 if sampling.max_tokens else 0
    if len(tokens) + room > max_length:
        raise ValueError(
            f"the prompt has {len(tokens)} tokens, and the model sees {max_length} with what it writes; give"
            f" at most {max_length - room}"
        )
    needed = min(len(tokens) + sampling.max_tokens, max_length)
    if needed > capacity:
        raise ValueError(
            f"the prompt and max_tokens={sampling.max_tokens} need pages for {needed} tokens, and there are"
            f" pages for {capacity}; lower max_tokens, or make the Generator with more pages= or memory="
        )


def _check_words(tokens: Sequence[int], sampling: Sampling, words: int | None) -> None:
    """Refuse tokens that the model does not know; it knows as many as ``words``, if it tells."""
    if not isinstance(sampling, Sampling):
        raise ValueError(f"a request takes a colossalai.inference.Sampling, got {sampling!r}")
    if not tokens:
        raise ValueError(
            "the prompt is empty; a model goes on from at least one token, such as its first one"
        )
    wrong = next((t for t in tokens if t < 0 or (words is not None and t >= words)), None)
    if wrong is not None:
        raise ValueError(
            f"the prompt has the token {wrong}, and this model knows 0 to {(words or 0) - 1}; is the"
            " tokenizer that of the model?"
        )
    unknown = next((t for t in sampling.stop_tokens if words is not None and t >= words), None)
    if unknown is not None:
        raise ValueError(
            f"stop_tokens has {unknown}, and this model knows the tokens 0 to {(words or 0) - 1}: it would"
            " never stop there"
        )
    for name in ("logprobs", "prompt_logprobs"):
        if words is not None and (getattr(sampling, name) or 0) > words:
            raise ValueError(f"{name}={getattr(sampling, name)}: this model knows {words} tokens")
