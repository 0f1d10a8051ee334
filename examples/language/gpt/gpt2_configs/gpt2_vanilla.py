"""GPT-2 small as it is, on one GPU; on more, each trains on its part of the data."""

from torch.optim import Adam

from colossalai.amp import AMP_TYPE
from titans.loss.lm_loss import GPTLMLoss
from titans.model.gpt import gpt2_small

BATCH_SIZE = 1  # per data-parallel rank
SEQ_LEN = 1024
NUM_EPOCHS = 60

optimizer = dict(type=Adam, lr=0.00015, weight_decay=1e-2)
fp16 = dict(mode=AMP_TYPE.NAIVE)
loss = dict(type=GPTLMLoss)
model = dict(type=gpt2_small, checkpoint=False)
parallel = dict(pipeline=1, tensor=dict(size=1, mode=None))
