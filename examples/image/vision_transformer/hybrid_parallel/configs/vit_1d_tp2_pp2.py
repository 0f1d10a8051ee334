"""Two pipeline stages of two ranks each, 1D."""

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

# parallel setting
TENSOR_PARALLEL_SIZE = 2
TENSOR_PARALLEL_MODE = "1d"

parallel = dict(pipeline=2, tensor=dict(mode=TENSOR_PARALLEL_MODE, size=TENSOR_PARALLEL_SIZE))

# pipeline config
NUM_MICRO_BATCHES = parallel["pipeline"]
TENSOR_SHAPE = (BATCH_SIZE // NUM_MICRO_BATCHES, SEQ_LENGTH, HIDDEN_SIZE)
