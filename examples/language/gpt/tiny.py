"""``--tiny``: a config with the same plan and features, and a model and a batch that two CPU cores train in
seconds.

The tensor mode and its size stay.  A pipeline of more than 2 stages gets 2, so that GPT-3's 96 processes
become 8.
"""

from __future__ import annotations

from typing import Any

from colossalai.context import Config
from titans.model.pipeline_gpt import build_gpt_pipeline

SIZES = {"vocab_size": 512, "hidden_size": 64, "num_heads": 8}
SEQ_LEN = 64
LAYERS_PER_STAGE = 2
DROPOUT = {"dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0}
# at most these
STAGES, MICRO_BATCHES, MICRO_BATCH_SIZE = 2, 4, 4
EPOCHS, LR = 2, 3e-3


def shrink(config: Config) -> Config:
    tiny = config.copy()
    micro_batches = config.get("NUM_MICRO_BATCHES") or 1
    size = min(max(config.BATCH_SIZE // micro_batches, 1), MICRO_BATCH_SIZE)
    tiny.SEQ_LEN, tiny.NUM_EPOCHS = SEQ_LEN, EPOCHS
    tiny.BATCH_SIZE = size * min(micro_batches, MICRO_BATCHES)
    if "NUM_MICRO_BATCHES" in config:
        tiny.NUM_MICRO_BATCHES = min(micro_batches, MICRO_BATCHES)
    if "HIDDEN_SIZE" in config:
        tiny.HIDDEN_SIZE = SIZES["hidden_size"]
    if "TENSOR_SHAPE" in config:
        tiny.TENSOR_SHAPE = (size, SEQ_LEN, SIZES["hidden_size"])
    stages = min(config.parallel.pipeline, STAGES)
    tiny.parallel = {**config.parallel, "pipeline": stages}
    tiny.optimizer = {**config.optimizer, "lr": LR}
    tiny.model = _model(config.model, stages)
    return tiny


def _model(model: Config, stages: int) -> dict[str, Any]:
    sizes = {**SIZES, **DROPOUT, "max_position_embeddings": SEQ_LEN}
    kept = {name: model[name] for name in ("checkpoint", "dtype", "num_chunks", "tied") if name in model}
    depth = LAYERS_PER_STAGE * stages * model.get("num_chunks", 1)
    if stages > 1:
        return {"type": build_gpt_pipeline, "num_layers": depth, **sizes, **kept}
    return {"type": model.type, "depth": depth, **sizes, **kept}
