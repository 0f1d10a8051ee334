"""8 ranks that share every layer, 2.5D: two layers of 2 x 2."""

from vit_base import (
    BATCH_SIZE,
    IMG_SIZE,
    NUM_EPOCHS,
    WARMUP_EPOCHS,
    clip_grad_norm,
    fp16,
    model,
    optimizer,
)

# parallel setting
TENSOR_PARALLEL_SIZE = 8
TENSOR_PARALLEL_MODE = "2.5d"

parallel = dict(tensor=dict(mode=TENSOR_PARALLEL_MODE, size=TENSOR_PARALLEL_SIZE, depth=2))
