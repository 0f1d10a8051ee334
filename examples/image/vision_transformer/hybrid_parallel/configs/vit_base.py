"""ViT-Base on CIFAR-10 at ImageNet's resolution: what the plans of this folder share.

By itself: data parallelism.
"""

import torch

from colossalai.amp import AMP_TYPE
from titans.model import pipeline_vit

# hyper parameters
# BATCH_SIZE is as per GPU
# global batch size = BATCH_SIZE x data parallel size
BATCH_SIZE = 256
LEARNING_RATE = 3e-3
WEIGHT_DECAY = 0.3
NUM_EPOCHS = 300
WARMUP_EPOCHS = 32

# model config
IMG_SIZE = 224
PATCH_SIZE = 16
HIDDEN_SIZE = 768
DEPTH = 12
NUM_HEADS = 12
MLP_RATIO = 4
NUM_CLASSES = 10
CHECKPOINT = True
SEQ_LENGTH = (IMG_SIZE // PATCH_SIZE) ** 2 + 1  # add 1 for cls token

model = dict(
    type=pipeline_vit.build_pipeline_vit,  # this rank's stage, or all of it without a pipeline
    num_layers=DEPTH,
    img_size=IMG_SIZE,
    patch_size=PATCH_SIZE,
    hidden_size=HIDDEN_SIZE,
    num_heads=NUM_HEADS,
    mlp_ratio=MLP_RATIO,
    num_classes=NUM_CLASSES,
    init_method="jax",
    checkpoint=CHECKPOINT,
)
optimizer = dict(type=torch.optim.AdamW, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)

fp16 = dict(mode=AMP_TYPE.NAIVE)
clip_grad_norm = 1.0
