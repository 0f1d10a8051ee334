"""GPT-2 small, data parallel, whose weights, gradients and optimizer states ZeRO-3 divides; these rest on the
CPU.
"""

from colossalai.nn.optimizer import HybridAdam
from colossalai.zero.shard_utils import TensorShardStrategy
from titans.loss.lm_loss import GPTLMLoss
from titans.model.gpt import gpt2_small

BATCH_SIZE = 1  # per GPU
SEQ_LEN = 1024
NUM_EPOCHS = 60

optimizer = dict(type=HybridAdam, lr=0.00015, weight_decay=1e-2)
zero = dict(
    model_config=dict(
        tensor_placement_policy="cpu", shard_strategy=TensorShardStrategy(), reuse_fp16_shard=True
    ),
    optimizer_config=dict(),
)
loss = dict(type=GPTLMLoss)
model = dict(type=gpt2_small, checkpoint=True)
parallel = dict(pipeline=1, tensor=dict(size=1, mode=None))
