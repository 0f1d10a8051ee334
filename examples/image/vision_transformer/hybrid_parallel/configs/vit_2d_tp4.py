"""4 ranks that share every layer, 2D."""

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
TENSOR_PARALLEL_SIZE = 4
TENSOR_PARALLEL_MODE = "2d"

parallel = dict(tensor=dict(mode=TENSOR_PARALLEL_MODE, size=TENSOR_PARALLEL_SIZE))
