"""A ViT of 0.4 million parameters, a few epochs: half a minute on two CPU cores."""

import torch

from titans.model import vit

BATCH_SIZE = 8  # per process
NUM_EPOCHS = 12
WARMUP_EPOCHS = 1
IMG_SIZE = 32

model = dict(
    type=vit.VisionTransformer,
    img_size=IMG_SIZE,
    patch_size=8,
    num_classes=10,
    depth=2,
    num_heads=4,
    hidden_size=128,
    dropout=0.0,
)
optimizer = dict(type=torch.optim.AdamW, lr=1e-3, weight_decay=0.05)

gradient_accumulation = 2
clip_grad_norm = 1.0
