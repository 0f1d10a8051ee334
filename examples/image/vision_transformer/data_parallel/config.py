"""ViT-Base on CIFAR-10 at ImageNet's resolution, data parallel, for GPUs."""

import torch

from colossalai.amp import AMP_TYPE
from titans.model import vit

BATCH_SIZE = 256  # per process
DROP_RATE = 0.1
NUM_EPOCHS = 300
WARMUP_EPOCHS = 32
IMG_SIZE = 224

model = dict(type=vit.vit_base_patch16_224, num_classes=10, dropout=DROP_RATE, checkpoint=True)
optimizer = dict(type=torch.optim.AdamW, lr=3e-3, weight_decay=0.3)

fp16 = dict(mode=AMP_TYPE.TORCH)
gradient_accumulation = 16
clip_grad_norm = 1.0
