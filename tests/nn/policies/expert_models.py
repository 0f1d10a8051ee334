"""Tiny models of transformers with experts, in float64 throughout, and runs on one rank and several."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

import colossalai
from colossalai.core import global_context as gpc
from colossalai.mesh import serial_tensor
from colossalai.mesh.mesh import DATA_AXES
from colossalai.pipeline.tied import synchronize_gradients
from tests.nn.policies.derived_zoo import double_loss

VOCABULARY, SAMPLES, LENGTH = 67, 4, 11
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "experts_implementation": "eager",  # the others do not know float64
}
_LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "moe_intermediate_size": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
}
CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mixtral": (MixtralConfig, {"num_local_experts": 4}),
    "few": (MixtralConfig, {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "qwen2_moe": (
        Qwen2MoeConfig,
        {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 12},
    ),
    "qwen3_moe": (Qwen3MoeConfig, {"num_experts": 4, "moe_intermediate_size": 8, "head_dim": 4}),
    "olmoe": (OlmoeConfig, {"num_experts": 4}),
    "deepseek_v2": (DeepseekV2Config, {**_LATENT, "topk_method": "group_limited_greedy", "head_dim": 4}),
    "deepseek_v3": (DeepseekV3Config, {**_LATENT, "num_nextn_predict_layers": 0}),
    "gpt_oss": (GptOssConfig, {"num_local_experts": 4, "head_dim": 4, "swiglu_limit": 0.05}),
}
BALANCED = ("mixtral", "few", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss")
"""Families whose loss has a part that balances their experts."""


def build(name: str, **options: Any) -> Any:
    """The model in float64; its weights are large enough that choices of experts differ."""
    kind, sizes = CONFIGS[name]
    chosen = {**SIZES, **sizes, **options}
    if name in BALANCED:
        chosen = {"output_router_logits": True, "router_aux_loss_coef": 0.5, **chosen}
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(kind(**chosen))
    for tensor in (*model.parameters(), *(b for n, b in model.named_buffers() if "correction" in n)):
        tensor.data.add_(torch.randn_like(tensor) * 0.3)
    for path, param in model.named_parameters():
        # softmax does not see a bias of the keys: its gradient is all rounding
        param.requires_grad_(not path.endswith("k_proj.bias"))
    model.loss_function = double_loss
    return model.double().train()


class _Double:
    """``torch`` for the code of a model, in which float32 is float64."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, {"float32": "float64", "float": "float64"}.get(name, name))


@contextmanager
def in_double(model: nn.Module) -> Iterator[None]:
    """Norms, routers and balancing losses of ``model`` compute in float64, not in float32."""
    home, native = sys.modules[type(model).__module__], Tensor.float

    def wide(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # but for losses, which are sent
        return x.double() if x.ndim else native(x, *args, **kwargs)

    with mock.patch.object(home, "torch", _Double()), mock.patch.object(Tensor, "float", wide):
        yield


def batch(step: int) -> dict[str, Tensor]:
    """Samples of other lengths, with equally many labels: the means of replicas have equal weights."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) < torch.tensor([LENGTH, 9, 8, 10])[:, None]).long()
    labels = ids.clone()
    labels[:, 8:] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@dataclass
class Seen:
    """What a run gave, as the serial model has it."""

    losses: list[Tensor] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    aux: list[Tensor] = field(default_factory=list)


def train(model: Any, samples: slice | None = None, steps: int = 2) -> Seen:
    """Steps of AdamW with all samples, or on the ranks of a launched job, each with its ``samples``."""
    mesh = None if samples is None else gpc.mesh
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = Seen()
    with in_double(model):
        for step in range(steps):
            optimizer.zero_grad()
            given = {name: value[samples or slice(None)] for name, value in batch(step).items()}
            out = model(**given, use_cache=False)
            out.loss.backward()
            seen.losses.append(out.loss.detach())
            if getattr(out, "aux_loss", None) is not None:
                seen.aux.append(out.aux_loss.detach())
            if mesh is not None:
                synchronize_gradients(model.parameters(), mesh)
            seen.grads.append({n: _whole(p.grad, p, mesh) for n, p in model.named_parameters()})
            optimizer.step()
    seen.weights = {n: _whole(p.detach(), p, mesh) for n, p in model.named_parameters()}
    return seen


def _whole(value: Tensor | None, param: Tensor, mesh: Any) -> Tensor:
    value = torch.zeros_like(param) if value is None else value
    return value if mesh is None else serial_tensor(value, param, mesh)


def launched(parallel: dict[str, Any]) -> slice:
    """Launch, and give the samples of this rank."""
    torch.set_num_threads(1)
    colossalai.launch_from_torch({"parallel": parallel}, backend="gloo", verbose=False)
    ranks = gpc.mesh.ranks(*(axis for axis in gpc.mesh.size if axis in DATA_AXES))
    own, each = ranks.index(gpc.mesh.rank), SAMPLES // len(ranks)
    return slice(own * each, (own + 1) * each)


def mean_over_ranks(x: Tensor) -> Tensor:
    """The mean over all ranks of the job; those that share a batch have equal values."""
    total = x.clone()
    torch.distributed.all_reduce(total)
    return total / torch.distributed.get_world_size()
