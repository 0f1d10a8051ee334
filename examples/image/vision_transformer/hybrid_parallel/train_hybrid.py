"""Train a ViT with pipeline or hybrid parallelism: the script of the documents' command, which is
``train_with_engine.py``.

torchrun --standalone --nproc_per_node 4 train_hybrid.py --config ./configs/config_hybrid_parallel.py
"""

from __future__ import annotations

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("train_with_engine.py")), run_name="__main__")
