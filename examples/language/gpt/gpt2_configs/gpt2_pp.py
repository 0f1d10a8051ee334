"""GPT-2 small in a pipeline of PIPELINE stages."""

import torch
from torch.optim import Adam

from colossalai.amp import AMP_TYPE
from titans.loss.lm_loss import GPTLMLoss
from titans.model.pipeline_gpt1d import GPT2_small_pipeline_1D

BATCH_SIZE = 1
SEQ_LEN = 1024
NUM_EPOCHS = 60
HIDDEN_SIZE = 768
NUM_MICRO_BATCHES = 1  # divides BATCH_SIZE
PIPELINE = 2
TENSOR_SHAPE = (BATCH_SIZE // NUM_MICRO_BATCHES, SEQ_LEN, HIDDEN_SIZE)

optimizer = dict(type=Adam, lr=0.00015, weight_decay=1e-2)
fp16 = dict(mode=AMP_TYPE.NAIVE)
loss = dict(type=GPTLMLoss)
model = dict(type=GPT2_small_pipeline_1D, checkpoint=False, dtype=torch.half)
parallel = dict(pipeline=PIPELINE, tensor=dict(size=1, mode=None))
