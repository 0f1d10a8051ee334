"""GPT-2 small, data parallel, whose gradients and optimizer states ZeRO-2 divides; the states rest on the
CPU.
"""

from colossalai.nn.optimizer import HybridAdam
from titans.loss.lm_loss import GPTLMLoss
from titans.model.gpt import gpt2_small

BATCH_SIZE = 1  # per GPU
SEQ_LEN = 1024
NUM_EPOCHS = 60

optimizer = dict(type=HybridAdam, lr=0.00015, weight_decay=1e-2)
zero = dict(level=2, dynamic_loss_scale=True, overlap_comm=True, clip_grad=1.0, cpu_offload=True)
loss = dict(type=GPTLMLoss)
model = dict(type=gpt2_small, checkpoint=True)
parallel = dict(pipeline=1, tensor=dict(size=1, mode=None))
