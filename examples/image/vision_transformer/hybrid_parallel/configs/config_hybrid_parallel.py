"""The plan of ``vit_1d_tp2_pp2.py`` under the name that the documents' commands give it."""

from vit_1d_tp2_pp2 import (
    BATCH_SIZE,
    HIDDEN_SIZE,
    IMG_SIZE,
    NUM_EPOCHS,
    NUM_MICRO_BATCHES,
    SEQ_LENGTH,
    TENSOR_SHAPE,
    WARMUP_EPOCHS,
    clip_grad_norm,
    fp16,
    model,
    optimizer,
    parallel,
)
