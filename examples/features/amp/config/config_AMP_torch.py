"""Torch AMP: weights in fp32, products in fp16 by autocast."""

from colossalai.amp import AMP_TYPE

BATCH_SIZE = 128

fp16 = dict(mode=AMP_TYPE.TORCH)
clip_grad_norm = 1.0
