"""The policies: for each architecture of Hugging Face, which module is cut how, and where the model is cut in
depth.

A path is matched against the end of a module's name; ``*`` stands for one part of it, and the empty path for
the base model (``model.base_model``).  What no rule names is left alone in 1D, where all ranks hold the whole
residual stream, and refused in the other modes.
"""

from __future__ import annotations

from typing import Any

import torch

from colossalai.nn.policies.cutting.policy import Policy
from colossalai.nn.policies.cutting.rules import (
    Cut,
    Gathered,
    Head,
    Heads,
    InnerDropout,
    Norm,
    Pieces,
    Stream,
    StreamDropout,
    Table,
)
from colossalai.nn.policies.stages.depth import Depth

EXPAND, CONTRACT, STAY = Cut("expand"), Cut("contract"), Cut("stay")
ENTRIES = Pieces("hidden", {"weight": 1})  # a small table: every entry is there, its features are cut
CLASSES = Head(vocabulary=False)

GPT2 = Policy(
    ("gpt2",),
    {
        "": Stream(),
        "wte": Table(),
        "wpe": ENTRIES,
        "h.*.ln_1": Norm(),
        "h.*.attn": Heads(sizes=("split_size",)),
        "h.*.attn.c_attn": Cut("expand", fused=3),
        "h.*.attn.c_proj": CONTRACT,
        "h.*.attn.resid_dropout": StreamDropout(),
        "h.*.ln_2": Norm(),
        "h.*.mlp.c_fc": EXPAND,
        "h.*.mlp.c_proj": CONTRACT,
        "ln_f": Norm(),
        "lm_head": Head(),
        "score": CLASSES,
        "classifier": CLASSES,
        "qa_outputs": CLASSES,
    },
    depth=Depth("h", entry=("wte", "wpe", "drop")),
)

BERT = Policy(
    ("bert",),
    {
        "": Stream(),
        "word_embeddings": Table(),
        "position_embeddings": ENTRIES,
        "token_type_embeddings": ENTRIES,
        "LayerNorm": Norm(),
        "attention.self": Heads(sizes=("all_head_size",)),
        "attention.self.query": EXPAND,
        "attention.self.key": EXPAND,
        "attention.self.value": EXPAND,
        "attention.output.dense": CONTRACT,
        "intermediate.dense": EXPAND,
        "layer.*.output.dense": CONTRACT,
        "pooler.dense": Gathered(),
        "transform.dense": STAY,
        "predictions.decoder": Head(),
        "seq_relationship": CLASSES,
        "classifier": CLASSES,
        "qa_outputs": CLASSES,
    },
    depth=Depth("encoder.layer", entry=("embeddings",)),
)


def _opt_positions(given: dict[str, Any]) -> dict[str, Any]:
    """OPT counts positions along the mask; in 3D the mask's rows are attention's, not those of the
    embedding.
    """
    mask, past = given.get("attention_mask"), given.get("past_key_values")
    if mask is None or mask.ndim != 2 or given.get("position_ids") is not None:
        return given
    positions = (torch.cumsum(mask, 1) * mask - 1).long()
    return {**given, "position_ids": positions[:, 0 if past is None else past.get_seq_length() :]}


OPT = Policy(
    ("opt",),
    {
        "decoder": Stream(prepare=_opt_positions),
        "embed_tokens": Table(),
        "embed_positions": ENTRIES,
        "project_in": STAY,
        "project_out": STAY,
        "self_attn": Heads(),
        "self_attn.q_proj": EXPAND,
        "self_attn.k_proj": EXPAND,
        "self_attn.v_proj": EXPAND,
        "self_attn.out_proj": CONTRACT,
        "self_attn_layer_norm": Norm(),
        "fc1": EXPAND,
        "fc2": CONTRACT,
        "final_layer_norm": Norm(),
        "lm_head": Head(),
        "score": CLASSES,
        "qa_outputs": CLASSES,
    },
    depth=Depth("layers", entry=("embed_tokens", "embed_positions", "project_in")),
)

LLAMA = Policy(
    ("llama", "mistral", "qwen2", "qwen3"),
    {
        # rotations are applied to heads, so positions are attention's
        "": Stream(attended=("attention_mask", "position_ids")),
        "embed_tokens": Table(),
        "input_layernorm": Norm(rms=True),
        "self_attn": Heads(),
        "self_attn.q_proj": EXPAND,
        "self_attn.k_proj": EXPAND,
        "self_attn.v_proj": EXPAND,
        "self_attn.q_norm": Pieces("inner"),
        "self_attn.k_norm": Pieces("inner"),
        "self_attn.o_proj": CONTRACT,
        "post_attention_layernorm": Norm(rms=True),
        "mlp.gate_proj": EXPAND,
        "mlp.up_proj": EXPAND,
        "mlp.down_proj": CONTRACT,
        "norm": Norm(rms=True),
        "lm_head": Head(),
        "score": CLASSES,
        "qa_outputs": CLASSES,
    },
    heads=("num_attention_heads", "num_key_value_heads"),
    depth=Depth("layers", entry=("embed_tokens",)),
)

T5 = Policy(
    ("t5",),
    {
        "encoder": Stream(),
        "decoder": Stream(),
        "shared": Table(),
        "embed_tokens": Table(),
        "SelfAttention": Heads(sizes=("inner_dim",)),
        "EncDecAttention": Heads(sizes=("inner_dim",)),
        "*.q": EXPAND,
        "*.k": EXPAND,
        "*.v": EXPAND,
        "*.o": CONTRACT,
        "relative_attention_bias": Pieces("inner", {"weight": 1}),  # (buckets, heads)
        "layer_norm": Norm(rms=True),
        "DenseReluDense.wi": EXPAND,
        "DenseReluDense.wi_0": EXPAND,
        "DenseReluDense.wi_1": EXPAND,
        "DenseReluDense.dropout": InnerDropout(),
        "DenseReluDense.wo": CONTRACT,
        "final_layer_norm": Norm(rms=True),
        "lm_head": Head(),
        "classifier": CLASSES,
        "qa_outputs": CLASSES,
    },
    heads=("num_heads",),
    depth=Depth(
        "block",
        entry=("shared", "embed_tokens"),
        carries=(
            "position_bias",
            None,
        ),  # the first block makes the bias of all; that of the encoder's states is zero
        towers=("encoder", "decoder"),
    ),
)

VIT = Policy(
    ("vit",),
    {
        "": Stream(),
        "embeddings": Pieces("hidden", {"cls_token": 2, "mask_token": 2, "position_embeddings": 2}),
        "patch_embeddings.projection": Pieces("hidden", {"weight": 0, "bias": 0}),
        "layernorm_before": Norm(),
        "attention": Heads(),
        "attention.q_proj": EXPAND,
        "attention.k_proj": EXPAND,
        "attention.v_proj": EXPAND,
        "attention.o_proj": CONTRACT,
        "layernorm_after": Norm(),
        "mlp.fc1": EXPAND,
        "mlp.fc2": CONTRACT,
        "layernorm": Norm(),
        "pooler.dense": Gathered(),
        "classifier": CLASSES,
    },
    depth=Depth("layers", entry=("embeddings",)),
)

POLICIES = (GPT2, BERT, OPT, LLAMA, T5, VIT)
