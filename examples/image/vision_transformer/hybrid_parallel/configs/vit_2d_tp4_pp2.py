"""Two pipeline stages of four ranks each, 2D."""

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
TENSOR_PARALLEL_SIZE = 4
TENSOR_PARALLEL_MODE = "2d"

parallel = dict(pipeline=2, tensor=dict(mode=TENSOR_PARALLEL_MODE, size=TENSOR_PARALLEL_SIZE))

# pipeline config
NUM_MICRO_BATCHES = parallel["pipeline"]
# as one rank holds it: half of the rows, half of the features
TENSOR_SHAPE = (BATCH_SIZE // NUM_MICRO_BATCHES // 2, SEQ_LENGTH, HIDDEN_SIZE // 2)
