"""Tiny models of every family of the installed transformers whose config carries a tensor-parallel plan.

Nothing is written down about a family: sizes are put into whatever fields its config has, and of its special
flags those are switched on that bring parameters or activations of their own.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY, BATCH, LENGTH = 67, 2, 8
LARGE = 5_000_000  # parameters: a field that holds a size was not known

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "max_position_embeddings": 32,
    "sliding_window": 4,
    "layer_types": None,
    "num_nextn_predict_layers": 0,
    # latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "qk_head_dim": 8,
    "v_head_dim": 8,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    # Gemma 3n and 4
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 0,
    "laurel_rank": 8,
    "altup_num_inputs": 2,
    "activation_sparsity_pattern": None,
    # images
    "image_size": 16,
    "patch_size": 4,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FLAGS = ("use_qk_norm", "qk_layernorm", "use_sliding_window", "attention_bias", "mlp_bias")
DROPS = ("drop", "dropout", "dropout_prob", "pdrop")


def families() -> list[str]:
    """The model types of all configs with a plan."""
    return sorted(
        kind for kind in CONFIG_MAPPING if getattr(CONFIG_MAPPING[kind], "base_model_tp_plan", None)
    )


def config(kind: str, *, drop: float = 0.0, flags: bool = True, **options: Any) -> Any:
    """A tiny config; every rate of dropout is ``drop``, and with ``flags`` the special ones are on."""
    return _tiny(CONFIG_MAPPING[kind], drop, flags, options)


def _tiny(cls: Any, drop: float, flags: bool, options: dict[str, Any]) -> Any:
    default = cls()
    known = {*vars(default), *inspect.signature(cls.__init__).parameters}
    chosen = {name: value for name, value in {**SIZES, **TOKENS}.items() if name in known}
    if "qk_rope_head_dim" in known:
        chosen["head_dim"] = chosen["qk_rope_head_dim"]  # what is rotated
    if "layer_types" in known and getattr(default, "layer_types", None):
        types = list(dict.fromkeys(default.layer_types))
        types.sort(key=lambda name: name == "full_attention")  # two that differ, and that one is among them
        chosen["layer_types"] = [types[0], types[-1]]
    chosen |= {
        name: drop
        for name in known
        if name.endswith(DROPS) and isinstance(getattr(default, name, None), float)
    }
    if flags:
        chosen |= {name: True for name in FLAGS if name in known}
    inner = {
        name: _tiny(kind, drop, flags, {})
        for name, kind in (getattr(cls, "sub_configs", None) or {}).items()
        if inspect.isclass(kind) and not inspect.isabstract(kind) and kind.model_type
    }
    return cls(**{**chosen, **inner, **options})


def model_class(kind: str) -> type[PreTrainedModel]:
    """The causal language model of a family, or what else takes its config, preferably the base model."""
    cls = CONFIG_MAPPING[kind]
    package = cls.__module__.rpartition(".")[0]
    stem = cls.__module__.rpartition(".")[2].replace("configuration_", "modeling_")
    module = importlib.import_module(f"{package}.{stem}")
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return getattr(module, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])  # type: ignore[no-any-return]
    fitting = [
        c
        for c in vars(module).values()
        if inspect.isclass(c)
        and issubclass(c, PreTrainedModel)
        and not c.__name__.endswith("PreTrainedModel")
        and c.__module__ == module.__name__
        and c.config_class is cls
    ]
    if not fitting:
        raise LookupError(f"no model takes a {cls.__name__}")
    return min(fitting, key=lambda c: (not c.__name__.endswith("Model"), len(c.__name__)))


def _check_small(kind: str, options: dict[str, Any]) -> None:
    with torch.device("meta"):
        count = sum(p.numel() for p in model_class(kind)(config(kind, **options)).parameters())
    if count > LARGE:
        raise LookupError(f"{kind} has {count:,} parameters however its config is shrunk")


# What some families want otherwise: as many keys as queries, or heads that their rotations are made for.
FALLBACKS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"head_dim": 64},
    {"head_dim": 128},
    {"hidden_size": 256},
    {"hidden_size": 512},
)


def find_options(kind: str, **options: Any) -> dict[str, Any]:
    """``options``, with those that this family needs to be built and run at all; LookupError if nobody knows
    them.
    """
    problem: Exception | None = None
    for fallback in FALLBACKS:
        chosen = {**fallback, **options}
        try:
            model = build(kind, **chosen)
            with torch.no_grad():
                if not torch.isfinite(loss(model, batch(model))):
                    raise ValueError("the loss is not finite")
        except Exception as error:
            problem = problem or error
            continue
        return chosen
    raise LookupError(f"{kind}: {type(problem).__name__}: {problem}") from problem


def build(kind: str, **options: Any) -> nn.Module:
    _check_small(kind, options)
    torch.manual_seed(0)
    model: nn.Module = model_class(kind)(config(kind, **options))
    for path, param in model.named_parameters():
        if not param.is_floating_point():
            continue
        # weights that start at 0 or 1 would hide a wrong cut
        param.data.add_(torch.randn_like(param) * 0.05)
        # softmax does not see a bias of the keys: its gradient is all rounding, and there is nothing to
        # compare
        param.requires_grad_(not path.endswith(("k_proj.bias", "key.bias")))
    return model.train()


def batch(model: nn.Module, step: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    config: Any = model.config
    if model.main_input_name == "pixel_values":
        size, channels = getattr(config, "image_size", 16), getattr(config, "num_channels", 3)
        return {"pixel_values": torch.randn(BATCH, channels, size, size, generator=generator)}
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if _has_head(model) and "labels" in inspect.signature(model.forward).parameters:
        given["labels"] = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
    return given


def _has_head(model: Any) -> bool:
    try:
        return model.get_output_embeddings() is not None
    except NotImplementedError:  # some towers have neither table nor head
        return False


def loss(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    out = model(**given, use_cache=False)
    if getattr(out, "loss", None) is not None:
        return out.loss  # type: ignore[no-any-return]
    states = out[0]
    targets = torch.randn(states.shape, generator=torch.Generator().manual_seed(7), dtype=states.dtype)
    return (states - targets).square().mean()
