"""Apex's levels, without Apex; O1 casts operation by operation."""

from colossalai.amp import AMP_TYPE

BATCH_SIZE = 128

fp16 = dict(mode=AMP_TYPE.APEX, opt_level="O1")
clip_grad_norm = 1.0
