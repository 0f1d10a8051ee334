"""GPT-3, 175 billion parameters, on the fewest GPUs of 40 GB: 96, in 24 stages, each shared by 4."""

import torch

from colossalai.amp import AMP_TYPE
from colossalai.nn.optimizer import FusedAdam
from titans.loss.vocab_cross_entropy import vocab_parallel_cross_entropy
from titans.model.pipeline_gpt1d import GPT3_pipeline_1D

BATCH_SIZE = 192
SEQ_LEN = 2048
NUM_EPOCHS = 60
NUM_MICRO_BATCHES = 192
HIDDEN_SIZE = 12288
PIPELINE = 24
TENSOR_PARALLEL = 4
MODE = "1d"
TENSOR_SHAPE = (BATCH_SIZE // NUM_MICRO_BATCHES, SEQ_LEN, HIDDEN_SIZE)

# torch's Adam would need another 8 bytes for each parameter while it steps
optimizer = dict(type=FusedAdam, lr=0.00015, weight_decay=1e-2)
fp16 = dict(mode=AMP_TYPE.NAIVE)
loss_fn = dict(type=vocab_parallel_cross_entropy)
model = dict(type=GPT3_pipeline_1D, checkpoint=True, dtype=torch.half)
parallel = dict(pipeline=PIPELINE, tensor=dict(size=TENSOR_PARALLEL, mode=MODE))
