"""Models of timm and torchvision, built without memory, have the weights of the serial constructor and
compute what the serial model does, under every plugin.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from colossalai.testing import parametrize_sample, spawn
from tests.lazy import vision

pytest.importorskip("transformers", reason="needs `pip install transformers`")

from tests.lazy.families import PLUGINS, run_plans

CHOSEN = """
    timm vit_tiny_patch16_224, timm swin_tiny_patch4_window7_224, timm convnext_atto,
    torchvision shufflenet_v2_x0_5, torchvision VisionTransformer, torchvision DenseNet
"""
FIRST = [kind.strip() for kind in CHOSEN.split(",")]
OTHERS = [kind for kind in vision.MODELS if kind not in FIRST]
GROUPS = [FIRST, *(OTHERS[i : i + 7] for i in range(0, len(OTHERS), 7))]


@pytest.mark.skipif(not vision.are_installed(), reason="needs requirements/vision.txt (`make install`)")
@parametrize_sample("kinds", GROUPS, 1, ids=["-".join(kinds) for kinds in GROUPS])
def test_weights_are_those_of_the_serial_constructor(kinds: list[str], tmp_path: Path) -> None:
    found, other = spawn(run_plans, 2, kinds=kinds, folder=str(tmp_path), launches=["data"], timeout=600.0)
    expected = dict.fromkeys(((kind, plan) for kind in kinds for plan in PLUGINS), "equal")
    assert found == other == expected


@pytest.mark.skipif(not vision.are_installed(), reason="needs requirements/vision.txt (`make install`)")
def test_transformers_are_cut_over_ranks_and_into_stages(tmp_path: Path) -> None:
    launches = ["tensor", "pipeline"]
    found, other = spawn(run_plans, 2, kinds=FIRST[:2], folder=str(tmp_path), launches=launches)
    assert found == other == dict.fromkeys(found, "equal")
    assert len(found) == 4
