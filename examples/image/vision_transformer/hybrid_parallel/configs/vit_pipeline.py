"""Two pipeline stages."""

from vit_base import (
    BATCH_SIZE,
    HIDDEN_SIZE,
    IMG_SIZE,
    NUM_EPOCHS,
    SEQ_LENGTH,
    WARMUP_EPOCHS,
    clip_grad_norm,
    fp16,
    model,
    optimizer,
)

parallel = dict(pipeline=2)

# pipeline config
NUM_MICRO_BATCHES = parallel["pipeline"]
TENSOR_SHAPE = (BATCH_SIZE // NUM_MICRO_BATCHES, SEQ_LENGTH, HIDDEN_SIZE)
