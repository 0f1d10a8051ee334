"""GPT-3, 175 billion parameters, on 96 GPUs: 24 stages, each a square of 2 x 2."""

import torch

from colossalai.amp import AMP_TYPE
from colossalai.nn.optimizer import FusedAdam
from titans.loss.vocab_cross_entropy import vocab_parallel_cross_entropy
from titans.model.pipeline_gpt import GPT3_pipeline_hybrid

BATCH_SIZE = 2 * 48
SEQ_LEN = 2048
NUM_EPOCHS = 60
NUM_MICRO_BATCHES = 48
HIDDEN_SIZE = 12288
PIPELINE = 24
TENSOR_PARALLEL = 4
MODE = "2d"
# the piece of a stage's output that one GPU holds
TENSOR_SHAPE = (BATCH_SIZE // NUM_MICRO_BATCHES // 2, SEQ_LEN, HIDDEN_SIZE // 2)

# torch's Adam would need another 8 bytes for each parameter while it steps
optimizer = dict(type=FusedAdam, lr=0.00015, weight_decay=1e-2)
fp16 = dict(mode=AMP_TYPE.NAIVE)
loss_fn = dict(type=vocab_parallel_cross_entropy)
model = dict(type=GPT3_pipeline_hybrid, checkpoint=True, dtype=torch.half)
parallel = dict(pipeline=PIPELINE, tensor=dict(size=TENSOR_PARALLEL, mode=MODE))
