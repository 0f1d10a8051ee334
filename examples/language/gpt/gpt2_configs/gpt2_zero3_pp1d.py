"""GPT-2 small as a pipeline of tensor-parallel stages, each divided by ZeRO-3 over its data-parallel
replicas.
"""

from colossalai.nn.optimizer import HybridAdam
from colossalai.zero.shard_utils import BucketTensorShardStrategy
from titans.loss.vocab_cross_entropy import vocab_parallel_cross_entropy
from titans.model.pipeline_gpt import GPT2_small_pipeline_hybrid

BATCH_SIZE = 8
SEQ_LEN = 1024
NUM_EPOCHS = 60
NUM_MICRO_BATCHES = 4  # divides BATCH_SIZE
HIDDEN_SIZE = 768
PIPELINE = 2
TENSOR_PARALLEL = 2
MODE = "1d"
TENSOR_SHAPE = (BATCH_SIZE // NUM_MICRO_BATCHES, SEQ_LEN, HIDDEN_SIZE)

optimizer = dict(type=HybridAdam, lr=0.00015, weight_decay=1e-2)
zero = dict(
    model_config=dict(
        tensor_placement_policy="cpu", shard_strategy=BucketTensorShardStrategy(), reuse_fp16_shard=True
    ),
    optimizer_config=dict(),
)
loss_fn = dict(type=vocab_parallel_cross_entropy)
# a weight that two stages share cannot be divided by ZeRO-3: the output head is one of its own
model = dict(type=GPT2_small_pipeline_hybrid, checkpoint=True, num_chunks=1, tied=False)
parallel = dict(pipeline=PIPELINE, tensor=dict(size=TENSOR_PARALLEL, mode=MODE))
