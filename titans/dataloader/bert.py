"""Text in which words are masked, for a BERT to predict them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from colossalai.utils import get_dataloader
from titans.dataloader.webtext import Row, SyntheticText, WebtextDataset

IGNORED = -100
SHARE = 0.15


class MaskedText(Dataset[tuple[dict[str, Tensor], Tensor]]):
    """``({"input_ids": ids}, labels)``: rows of ``text``; a ``share`` of their tokens is to be predicted.

    Of these, 8 in 10 are replaced by ``mask_id``, 1 by a word of the vocabulary, 1 by itself; the labels of
    all others are -100.  Equally many are chosen in each row, so the mean over rows is that over tokens, and
    a row is masked alike on every rank and in every pass.
    """

    def __init__(
        self, text: Dataset[Row], vocab_size: int, mask_id: int, share: float = SHARE, seed: int = 0
    ) -> None:
        if not 0 < share <= 1 or not 0 <= mask_id < vocab_size:
            raise ValueError(
                f"MaskedText needs 0 < share <= 1 and 0 <= mask_id < vocab_size, got share={share},"
                f" mask_id={mask_id} and vocab_size={vocab_size}"
            )
        self.text, self.vocab_size, self.mask_id, self.share, self.seed = (
            text,
            vocab_size,
            mask_id,
            share,
            seed,
        )

    def __len__(self) -> int:
        return len(self.text)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        ids = self.text[index][1].clone()
        generator = torch.Generator().manual_seed(self.seed * len(self) + index)
        chosen = torch.randperm(len(ids), generator=generator)[: max(1, round(self.share * len(ids)))]
        labels = torch.full_like(ids, IGNORED)
        labels[chosen] = ids[chosen]
        kind = torch.rand(len(chosen), generator=generator)
        other = torch.randint(self.vocab_size, (len(chosen),), generator=generator)
        ids[chosen] = torch.where(kind < 0.8, self.mask_id, torch.where(kind < 0.9, other, ids[chosen]))
        return {"input_ids": ids}, labels


def get_bert_pretrain_data_loader(
    path: str | Path | None,
    batch_size: int,
    seq_length: int = 512,
    vocab_size: int = 30528,
    *,
    rows: int = 1024,
    seed: int = 0,
    **options: Any,
) -> DataLoader:
    """This data-parallel rank's batches of masked text, of ``batch_size`` rows of ``seq_length`` tokens.

    The text lies at ``path``, as ``WebtextDataset`` reads it, a token for each byte; with None it is ``rows``
    rows of random tokens.  The last token of the vocabulary is the mask.  ``options`` go to
    ``colossalai.utils.get_dataloader``.  Ranks that share a sequence, or a model, get the same batches.
    """
    text: Dataset[Row]
    if path is None:
        text = SyntheticText(rows, seq_length, vocab_size - 1, seed)
    else:
        text = WebtextDataset(path, seq_length)
        if text.vocab_size >= vocab_size:
            raise ValueError(
                f"the text has {text.vocab_size} tokens, and the mask is one more: vocab_size={vocab_size} is"
                " too small"
            )
    masked = MaskedText(text, vocab_size, vocab_size - 1, seed=seed)
    return get_dataloader(masked, batch_size=batch_size, **{"shuffle": True, "drop_last": True, **options})
