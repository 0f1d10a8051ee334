"""Data parallelism alone, with the batches and the precision of the documents' first step."""

from vit_base import IMG_SIZE, NUM_EPOCHS, WARMUP_EPOCHS, clip_grad_norm, model, optimizer

from colossalai.amp import AMP_TYPE

BATCH_SIZE = 256  # per process
DROP_RATE = 0.1

fp16 = dict(mode=AMP_TYPE.TORCH)
gradient_accumulation = 16
