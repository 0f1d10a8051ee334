"""Text with masked words for BERT."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from colossalai.core import global_context as gpc
from colossalai.testing import spawn
from tests.titans.cut_sequences import launch
from titans.dataloader.bert import IGNORED, MaskedText, get_bert_pretrain_data_loader
from titans.dataloader.webtext import SyntheticText


def test_a_share_of_each_row_is_masked() -> None:
    text = SyntheticText(50, 200, 99)
    masked = MaskedText(text, vocab_size=100, mask_id=99)
    assert len(masked) == 50
    kinds = torch.zeros(3)
    for i in range(50):
        ids, (inputs, labels) = text[i][1], masked[i]
        chosen = labels != IGNORED
        assert chosen.sum() == 30
        assert torch.equal(labels[chosen], ids[chosen])
        assert torch.equal(inputs["input_ids"][~chosen], ids[~chosen])
        shown = inputs["input_ids"][chosen]
        kinds += torch.stack([(shown == 99).sum(), (shown == ids[chosen]).sum(), torch.tensor(len(shown))])
    assert (kinds[:2] / kinds[2]).tolist() == pytest.approx([0.8, 0.1], abs=0.02)
    assert torch.equal(masked[7][0]["input_ids"], masked[7][0]["input_ids"])
    with pytest.raises(ValueError, match=r"0 <= mask_id < vocab_size, got .* mask_id=100"):
        MaskedText(text, vocab_size=100, mask_id=100)


def test_text_from_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("colourless green ideas " * 20)
    (inputs, labels), *rest = get_bert_pretrain_data_loader(tmp_path, 4, 16, 300)
    assert inputs["input_ids"].shape == labels.shape == (4, 16)
    assert len(rest) == 460 // 16 // 4 - 1
    with pytest.raises(ValueError, match="vocab_size=256 is too small"):
        get_bert_pretrain_data_loader(tmp_path, 4, 16, 256)


def check_ranks(rank: int, world_size: int, port: int) -> list[int]:
    launch({"sequence": 2})
    loader = get_bert_pretrain_data_loader(None, 2, 8, 50, rows=8)
    assert len(loader) == 8 // 2 // gpc.data_parallel_size
    return [int(ids.sum()) for (ids, _) in ((inputs["input_ids"], labels) for inputs, labels in loader)]


def test_ranks_of_one_sequence_read_the_same() -> None:
    a, b, c, d = spawn(check_ranks, 4)
    assert a == b
    assert c == d
    assert a != c
