"""Tiny models of families for which there is no table: their plans are derived."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

VOCABULARY = 131  # a prime: no number of ranks divides it
BATCH, LENGTH = 4, 6
_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
_BLOCK = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
}
_GPT = {"n_layer": 2, "n_embd": 16, "n_head": 4, "n_positions": 16, "n_inner": 32}
_BART = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 16,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
}
_T5 = {
    "d_model": 16,
    "d_kv": 4,
    "num_heads": 4,
    "d_ff": 32,
    "num_layers": 2,
    "relative_attention_num_buckets": 8,
    "decoder_start_token_id": 0,
}
_IMAGE = {"image_size": 8, "patch_size": 4, "num_labels": 5}
_CLIP = {k: v for k, v in _BLOCK.items() if k != "max_position_embeddings"}

# The class of a model, and the options of its config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gptj": ("GPTJForCausalLM", {**_GPT, "rotary_dim": 4}),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {
            **_BLOCK,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
        },
    ),
    "codegen": ("CodeGenForCausalLM", {**_GPT, "rotary_dim": 4}),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", {**_GPT, "multi_query": False}),
    "gpt_bigcode_mqa": ("GPTBigCodeForCausalLM", {**_GPT, "multi_query": True}),
    "falcon": (
        "FalconForCausalLM",
        {
            **_BLOCK,
            "ffn_hidden_size": 32,
            "new_decoder_architecture": True,
            "num_kv_heads": 4,
            "num_attention_heads": 8,
        },
    ),
    "falcon_alibi": (
        "FalconForCausalLM",
        {**_BLOCK, "ffn_hidden_size": 32, "alibi": True, "multi_query": False},
    ),
    "falcon_mqa": ("FalconForCausalLM", {**_BLOCK, "ffn_hidden_size": 32, "multi_query": True}),
    "bloom": ("BloomForCausalLM", {**_BLOCK, "n_layer": 2, "n_head": 4}),
    "mpt": (
        "MptForCausalLM",
        {"d_model": 16, "n_heads": 4, "n_layers": 2, "max_seq_len": 16, "expansion_ratio": 2},
    ),
    "stablelm": ("StableLmForCausalLM", {**_BLOCK, "num_key_value_heads": 4}),
    "persimmon": ("PersimmonForCausalLM", _BLOCK),
    "biogpt": ("BioGptForCausalLM", _BLOCK),
    "xglm": (
        "XGLMForCausalLM",
        {"d_model": 16, "ffn_dim": 32, "num_layers": 2, "attention_heads": 4, "max_position_embeddings": 16},
    ),
    "roberta": ("RobertaForMaskedLM", _BLOCK),
    "camembert": ("CamembertForMaskedLM", _BLOCK),
    "xlm_roberta": ("XLMRobertaForMaskedLM", _BLOCK),
    "distilbert": (
        "DistilBertForMaskedLM",
        {"n_layers": 2, "n_heads": 4, "dim": 16, "hidden_dim": 32, "max_position_embeddings": 16},
    ),
    "albert": ("AlbertForMaskedLM", {**_BLOCK, "embedding_size": 8, "num_hidden_layers": 3}),
    "electra": ("ElectraForMaskedLM", {**_BLOCK, "embedding_size": 8}),
    "deberta": (
        "DebertaForMaskedLM",
        {**_BLOCK, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 8},
    ),
    "deberta_v2": (
        "DebertaV2ForMaskedLM",
        {
            **_BLOCK,
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "share_att_key": True,
            "max_relative_positions": 8,
        },
    ),
    "mpnet": (
        "MPNetForMaskedLM",
        {**_BLOCK, "max_position_embeddings": 20},
    ),
    "xlnet": ("XLNetLMHeadModel", {"d_model": 16, "n_layer": 2, "n_head": 4, "d_inner": 32}),
    "modernbert": (
        "ModernBertForMaskedLM",
        {**_BLOCK, "cls_token_id": 3, "sep_token_id": 4, "local_attention": 4},
    ),
    "mt5": ("MT5ForConditionalGeneration", _T5),
    "bart": ("BartForConditionalGeneration", _BART),
    "mbart": ("MBartForConditionalGeneration", _BART),
    "pegasus": ("PegasusForConditionalGeneration", _BART),
    "marian": ("MarianMTModel", _BART),
    "whisper": (
        "WhisperForConditionalGeneration",
        {
            **_BART,
            "num_mel_bins": 8,
            "max_source_positions": 6,
            "max_target_positions": 16,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
    "wav2vec2": (
        "Wav2Vec2ForCTC",
        {
            **_BLOCK,
            "conv_dim": [8, 8],
            "conv_kernel": [10, 3],
            "conv_stride": [5, 2],
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "mask_time_prob": 0.0,
            "layerdrop": 0.0,
            "vocab_size": 12,
            "ctc_zero_infinity": True,
            "ctc_loss_reduction": "mean",  # of micro-batches too
        },
    ),
    "clip": (
        "CLIPModel",
        {
            "text_config": {**_BLOCK, **_TOKENS},
            "vision_config": {**_CLIP, "image_size": 8, "patch_size": 4},
            "projection_dim": 8,
        },
    ),
    "openai_gpt": ("OpenAIGPTLMHeadModel", _GPT),
    "roformer": ("RoFormerForMaskedLM", {**_BLOCK, "embedding_size": 8}),
    "speech_to_text": (
        "Speech2TextForConditionalGeneration",
        {
            **_BART,
            "input_feat_per_channel": 8,
            "input_channels": 1,
            "conv_channels": 16,
            "max_source_positions": 32,
            "max_target_positions": 16,
        },
    ),
    "led": (
        "LEDForConditionalGeneration",
        {
            **_BART,
            "attention_window": 6,
            "max_encoder_position_embeddings": 16,
            "max_decoder_position_embeddings": 16,
        },
    ),
    "llama_mqa": ("LlamaForCausalLM", {**_BLOCK, "num_key_value_heads": 1}),
    "llama_gqa": ("LlamaForCausalLM", {**_BLOCK, "num_key_value_heads": 2}),
    "deit": ("DeiTForImageClassification", {**_BLOCK, **_IMAGE}),
    "beit": ("BeitForImageClassification", {**_BLOCK, **_IMAGE, "use_relative_position_bias": True}),
    "dinov2": ("Dinov2ForImageClassification", {**_BLOCK, **_IMAGE, "mlp_ratio": 2}),
    "vit_mae": (
        "ViTMAEForPreTraining",
        {
            **_BLOCK,
            **_IMAGE,
            "decoder_hidden_size": 16,
            "decoder_num_attention_heads": 4,
            "decoder_num_hidden_layers": 2,
            "decoder_intermediate_size": 32,
        },
    ),
    "swinv2": (
        "Swinv2ForImageClassification",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [1, 2],
            "num_heads": [4, 4],
            "window_size": 2,
            "num_labels": 5,
        },
    ),
    "videomae": ("VideoMAEForVideoClassification", {**_BLOCK, **_IMAGE, "num_frames": 4}),
    "ast": ("ASTForAudioClassification", {**_BLOCK, "max_length": 24, "num_mel_bins": 16, "num_labels": 5}),
    "swin": (
        "SwinForImageClassification",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [1, 2],
            "num_heads": [4, 4],
            "window_size": 2,
            "num_labels": 5,
        },
    ),
}


def build(name: str, **options: Any) -> nn.Module:
    kind, sizes = MODELS[name]
    cls = getattr(transformers, kind)
    tokens = {} if name in ("clip",) else _TOKENS
    config = cls.config_class(**{**tokens, **sizes, **options})
    for field, value in vars(config).items():
        if isinstance(value, float) and "drop" in field and field not in options:
            setattr(config, field, 0.0)
    for inner in getattr(config, "sub_configs", None) or {}:
        part = getattr(config, inner)
        for field, value in vars(part).items():
            if isinstance(value, float) and "drop" in field:
                setattr(part, field, 0.0)
    torch.manual_seed(0)
    model: nn.Module = cls(config)
    for param in model.parameters():
        # what starts at 0 or 1 would hide a wrong cut
        param.data.add_(torch.randn_like(param) * 0.05)
    # softmax does not see a bias of the keys: its gradient is all rounding, and AdamW makes steps of it
    for path, param in model.named_parameters():
        if path.endswith(("k_proj.bias", "key.bias", "k_lin.bias", "attn.k.bias")):
            param.requires_grad_(False)
    if getattr(model, "loss_type", None) in ("ForCausalLM", "ForMaskedLM") or name == "openai_gpt":
        model.loss_function = double_loss  # type: ignore[assignment]
    return model.double().train()


def batch(model: nn.Module, step: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    config: Any = model.config
    names = inspect.signature(model.forward).parameters
    ids = torch.randint(5, VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels = torch.randint(5, VOCABULARY, (BATCH, LENGTH), generator=generator)
    if config.model_type == "clip":
        return {"input_ids": ids, "pixel_values": _random((BATCH, 3, 8, 8), generator), "return_loss": True}
    if "pixel_values" in names:
        size = config.image_size
        shots = (config.num_frames,) if hasattr(config, "num_frames") else ()
        given = {"pixel_values": _random((BATCH, *shots, 3, size, size), generator)}
        if "noise" in names:
            return {
                **given,
                "noise": torch.rand(BATCH, (size // config.patch_size) ** 2, generator=generator),
            }
        return {**given, "labels": torch.randint(5, (BATCH,), generator=generator)}
    if "input_features" in names:
        bins = getattr(config, "num_mel_bins", None)
        form = (12, config.input_feat_per_channel) if bins is None else (bins, 12)
        return {"input_features": _random((BATCH, *form), generator), "labels": labels}
    if "input_values" in names and hasattr(config, "num_mel_bins"):
        sound = _random((BATCH, config.max_length, config.num_mel_bins), generator)
        return {"input_values": sound, "labels": torch.randint(5, (BATCH,), generator=generator)}
    if "input_values" in names:
        # the CTC loss of transformers is in float32
        few = torch.randint(2, 12, (BATCH, 3), generator=generator)
        return {"input_values": _random((BATCH, 200), generator), "labels": few}
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    labels[0, -2:] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _random(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def loss(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    return model(**given).loss  # type: ignore[no-any-return]


def double_loss(logits: Tensor, labels: Tensor, *_: Any, **__: Any) -> Tensor:
    """The next word is predicted; the losses of transformers are in float32, whatever the dtype is."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).double(), labels[:, 1:].flatten())
