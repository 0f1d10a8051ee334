"""Attention to pages and writes into them, against the definition, by plain PyTorch and by Triton."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from colossalai.kernel import paged_attention as pages
from tests.kernel.paged_cases import CASES, PAGE, Case, compare


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_follows_its_definition(case: Case) -> None:
    compare(case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_gpu_follows_the_definition(case: Case, dtype: torch.dtype) -> None:
    compare(dataclasses.replace(case, device="cuda", dtype=dtype))


def test_sequences_without_keys_give_zeros() -> None:
    case = Case([1, 1], [9, 0], 2, 2, 8)
    found = case.run(None)
    assert found[1].eq(0).all()
    assert found[0].ne(0).all()


def test_tokens_are_written_to_their_slots_and_nowhere_else() -> None:
    keys, values = torch.randn(4, 2, 24)[..., ::2], torch.randn(4, 2, 8)  # keys of another width, with gaps
    key_pages, value_pages = torch.zeros(3, PAGE, 2, 12), torch.zeros(3, PAGE, 2, 8)
    pages.write_pages(keys, values, key_pages, value_pages, torch.tensor([9, -1, 0, 3]))
    for page, tokens in ((key_pages, keys), (value_pages, values)):
        flat = page.flatten(0, 1)
        assert torch.equal(flat[[9, 0, 3]], tokens[[0, 2, 3]])
        assert flat.abs().sum((1, 2)).count_nonzero() == 3


def test_the_operators_have_meta_kernels() -> None:
    case = dataclasses.replace(CASES[0], device="meta")
    assert case.run(None).shape == case.tensors[0].shape


def run_in_triton() -> None:
    """In Triton's interpreter: the kernels get tensors of the CPU."""
    from colossalai.kernel import triton_paged_attention

    triton_paged_attention.on_device_of = lambda _: torch.inference_mode()
    pages._on_gpu = lambda *_: True
    for case in CASES:
        compare(case)
    test_sequences_without_keys_give_zeros()
    test_tokens_are_written_to_their_slots_and_nowhere_else()


def test_triton_in_its_interpreter() -> None:
    pytest.importorskip("triton", reason="pip install triton")
    code = "from tests.kernel.test_paged_attention import run_in_triton; run_in_triton()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this Triton's interpreter does not know this numpy: pip install 'numpy<2.4'")
    assert done.returncode == 0, done.stderr[-3000:]
