"""Hugging Face GPT-2 by specs equals the serial one: weights bit for bit, loss, every gradient, weights after Adam steps."""

from __future__ import annotations

from functools import partial

import pytest

from colossalai.testing.parity import assert_equal_to_serial
from tests.tensor.gpt2 import page_10, page_42, problem

pytest.importorskip("transformers")


@pytest.mark.parametrize(("nprocs", "tp"), [(2, 2), (4, 4), (4, 2), (2, 1)])
def test_page_10(nprocs: int, tp: int) -> None:
    assert_equal_to_serial(problem, partial(page_10, tp=tp), nprocs)


def test_page_10_with_activation_checkpointing() -> None:
    assert_equal_to_serial(partial(problem, checkpoint=True), partial(page_10, tp=2), 2)


def test_page_42_where_parameters_begin_cut() -> None:
    assert_equal_to_serial(partial(problem, vocab_size=38), partial(page_42, tp=2), 2)
