"""A GPT whose step is measured on CPU ranks and predicted on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Adam

from colossalai.amp import AMP_TYPE
from colossalai.core import global_context as gpc
from colossalai.dry_run import Parts
from titans.loss.lm_loss import GPTLMLoss
from titans.model.gpt import GPT
from titans.model.pipeline_gpt import build_gpt_pipeline

DEPTH, SEQ_LEN, BATCH = 4, 64, 8
SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "max_position_embeddings": SEQ_LEN,
    "hidden_size": 128,
    "num_heads": 4,
    "dropout": 0.0,
    "embedding_dropout": 0.0,
    "attention_dropout": 0.0,
}
NAIVE = {"mode": AMP_TYPE.NAIVE, "initial_scale": 1}  # so that no step is skipped
ONE_D = {"size": 2, "mode": "1d"}

# processes, config, checkpoint
PLANS: dict[str, tuple[int, dict[str, Any], bool]] = {
    "float32": (1, {}, False),
    "fp16": (1, {"fp16": NAIVE}, False),
    "checkpoint": (1, {"fp16": NAIVE}, True),
    "clipped": (1, {"fp16": NAIVE, "clip_grad_norm": 1.0}, False),
    "1d": (2, {"fp16": NAIVE, "parallel": {"tensor": ONE_D}}, False),
    "2d": (4, {"fp16": NAIVE, "parallel": {"tensor": {"size": 4, "mode": "2d"}}}, False),
    "3d": (8, {"fp16": NAIVE, "parallel": {"tensor": {"size": 8, "mode": "3d"}}}, False),
    "pipeline": (2, {"fp16": NAIVE, "parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 4}, False),
    "gpipe": (2, {"parallel": {"pipeline": {"size": 2, "schedule": "gpipe"}}, "NUM_MICRO_BATCHES": 8}, False),
    "four stages": (4, {"fp16": NAIVE, "parallel": {"pipeline": 4}, "NUM_MICRO_BATCHES": 8}, False),
    "interleaved": (2, {"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 4, "NUM_CHUNKS": 2}, False),
    "hybrid": (
        4,
        {"fp16": NAIVE, "parallel": {"pipeline": 2, "tensor": ONE_D}, "NUM_MICRO_BATCHES": 4},
        True,
    ),
}


def build(checkpoint: bool, tied: bool = True) -> Parts:
    """The parts of a training in the launched plan, on the default device."""
    kwargs = {**SIZES, "checkpoint": checkpoint, "tied": tied}
    if gpc.pipeline_parallel_size > 1:
        model = build_gpt_pipeline(DEPTH, gpc.config.get("NUM_CHUNKS") or 1, **kwargs)
    else:
        model = GPT(depth=DEPTH, **kwargs)
    ids = torch.zeros(BATCH, SEQ_LEN, dtype=torch.long)
    # on a CPU, torch would go through the parameters one by one
    optimizer = Adam(model.parameters(), lr=1e-3, weight_decay=1e-2, foreach=True)
    return Parts(model, optimizer, GPTLMLoss(), ({"input_ids": ids}, ids))
