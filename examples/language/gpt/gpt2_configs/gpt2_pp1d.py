"""GPT-2 small in a pipeline of stages that are each shared by TENSOR_PARALLEL GPUs, in any MODE; data
parallel besides.

MODE is None, '1d', '2d', '2.5d' or '3d'; TENSOR_PARALLEL is 1, any, a square, DEPTH x a square, a cube.
"""

import torch
from torch.optim import Adam

from colossalai.amp import AMP_TYPE
from titans.loss.vocab_cross_entropy import vocab_parallel_cross_entropy
from titans.model.pipeline_gpt import GPT2_small_pipeline_hybrid

BATCH_SIZE = 8
SEQ_LEN = 1024
NUM_EPOCHS = 60
NUM_MICRO_BATCHES = 1  # divides BATCH_SIZE
HIDDEN_SIZE = 768
PIPELINE = 2
TENSOR_PARALLEL = 2
MODE = "1d"
DEPTH = 1  # of 2.5D
TENSOR_SHAPE = (BATCH_SIZE // NUM_MICRO_BATCHES, SEQ_LEN, HIDDEN_SIZE)

optimizer = dict(type=Adam, lr=0.00015, weight_decay=1e-2)
fp16 = dict(mode=AMP_TYPE.NAIVE)
loss_fn = dict(type=vocab_parallel_cross_entropy)
model = dict(type=GPT2_small_pipeline_hybrid, checkpoint=False, dtype=torch.half)
parallel = dict(
    pipeline=PIPELINE,
    tensor=dict(size=TENSOR_PARALLEL, mode=MODE, **(dict(depth=DEPTH) if MODE == "2.5d" else {})),
)
