"""Naive AMP: everything in fp16, with fp32 masters in the optimizer."""

from colossalai.amp import AMP_TYPE

BATCH_SIZE = 128

fp16 = dict(mode=AMP_TYPE.NAIVE)
clip_grad_norm = 1.0
