"""Train a ViT under a plan of configs/ with a trainer: the script is the same for all plans, and for none.

colossalai run --nproc_per_node 4 train_with_trainer.py --config configs/vit_1d_tp2_pp2.py
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

IMAGE = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    sys.path.insert(0, str(IMAGE))  # where the script finds its parts
    runpy.run_path(str(IMAGE / "train_with_trainer.py"), run_name="__main__")
