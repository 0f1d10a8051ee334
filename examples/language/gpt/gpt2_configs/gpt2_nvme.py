"""GPT-2 small, data parallel, divided by ZeRO-3: weights rest on the CPU, optimizer states on a disk."""

from colossalai.nn.optimizer import HybridAdam
from titans.loss.lm_loss import GPTLMLoss
from titans.model.gpt import gpt2_small

BATCH_SIZE = 1  # per GPU
SEQ_LEN = 1024
NUM_EPOCHS = 60

optimizer = dict(type=HybridAdam, lr=0.00015, weight_decay=1e-2)
zero = dict(
    level=3,
    dynamic_loss_scale=True,
    clip_grad=1.0,
    offload_optimizer_config=dict(device="nvme", nvme_path="/tmp"),  # a folder of your fastest local disk
    offload_param_config=dict(device="cpu"),
)
loss = dict(type=GPTLMLoss)
model = dict(type=gpt2_small, checkpoint=True)
parallel = dict(pipeline=1, tensor=dict(size=1, mode=None))
