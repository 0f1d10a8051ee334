"""Families of transformers, built without memory, have the weights of the serial constructor, or of their
files, under every plan.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from colossalai.testing import parametrize_sample, spawn

pytest.importorskip("transformers", reason="needs `pip install transformers`")

from tests.lazy.families import run_plans

NAMES = """
    gpt2 llama vit
    bert t5 mistral opt qwen2 qwen3 gemma gemma2 phi phi3 gpt_neox gpt_neo falcon bloom biogpt stablelm
    persimmon roberta camembert albert electra deberta deberta-v2 mpnet modernbert cohere glm olmo olmo2
    granite starcoder2 mixtral qwen2_moe deepseek_v3 deit beit dinov2 clip wav2vec2 vit_mae mamba nemotron
"""
KINDS = NAMES.split()
OTHERWISE = ["stored llama", "meta gpt2", "meta bloom"]
GROUPS = [[*KINDS[:3], *OTHERWISE], *(KINDS[i : i + 6] for i in range(3, len(KINDS), 6))]
KNOWN = ["gpt2", "bert", "opt", "llama", "mistral", "qwen2", "qwen3", "t5", "vit", *OTHERWISE]
NO_STAGES = ("clip", "wav2vec2")  # here: models without a head
NO_PLAN = (
    "do not compute what the whole model does",
    "parallelize has no policy",
    "asks for style",
    "it works whole, but",
)


@parametrize_sample("kinds", GROUPS, 1, ids=["-".join(kinds) for kinds in GROUPS])
def test_weights_are_those_of_the_serial_constructor(kinds: list[str], tmp_path: Path) -> None:
    found, other = spawn(run_plans, 2, kinds=kinds, folder=str(tmp_path), timeout=600.0)
    assert found == other
    for (kind, plan), outcome in found.items():
        may_refuse = kind not in KNOWN if plan == "1d" else plan == "pipeline" and kind in NO_STAGES
        refused = may_refuse and any(words in outcome for words in NO_PLAN)
        assert outcome == "equal" or refused, f"{kind} {plan}: {outcome}"
