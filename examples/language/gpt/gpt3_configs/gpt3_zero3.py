"""GPT-3, 175 billion parameters, data parallel on 96 GPUs whose weights and optimizer states ZeRO-3 divides;
these rest on the CPU.
"""

from colossalai.nn.optimizer import HybridAdam
from titans.loss.lm_loss import GPTLMLoss
from titans.model.gpt import gpt3

BATCH_SIZE = 2  # per GPU
SEQ_LEN = 2048
NUM_EPOCHS = 60
NUM_GPUS = 96  # what `train_gpt.py --dry-run` assumes

optimizer = dict(type=HybridAdam, lr=0.00015, weight_decay=1e-2)
zero = dict(
    model_config=dict(tensor_placement_policy="cpu", reuse_fp16_shard=True),
    optimizer_config=dict(),
)
loss = dict(type=GPTLMLoss)
model = dict(type=gpt3, checkpoint=True)
parallel = dict(pipeline=1, tensor=dict(size=1, mode=None))
