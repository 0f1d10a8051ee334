"""The loss of a language model: how surprised it is by each next token, in nats."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import pad

from colossalai.mesh.agreement import can_compare, everyone, fingerprint
from colossalai.nn import CrossEntropyLoss
from colossalai.nn.sequence import SequenceParallel


class GPTLMLoss(nn.Module):
    """Mean cross entropy of token ``t + 1`` under the logits at ``t``.

    ``labels`` are the input ids themselves (the shift happens here); a label equal to ``ignore_index``, for
    example at padding, does not count.  Under tensor parallelism, or where sequences are cut, ``logits`` are
    what the model returns on this rank, and ``labels`` those of the whole batch.
    """

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.loss = CrossEntropyLoss(ignore_index=ignore_index)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        if logits.ndim != 3 or labels.ndim != 2 or not self._fits(logits.shape[1], labels):
            raise ValueError(
                "GPTLMLoss needs logits of shape (batch, sequence, vocab) and labels of shape "
                f"(batch, sequence) with at least 2 tokens per row, got {tuple(logits.shape)} and "
                f"{tuple(labels.shape)}"
            )
        # The labels are shifted rather than the logits cut, which would copy them; the last logits have no
        # label.
        labels = pad(labels[..., 1:], (0, 1), value=self.ignore_index)  # (batch, seq)
        return self.loss(logits, labels)

    def _fits(self, rows: int, labels: Tensor) -> bool:
        sequence, length = self.loss.sequence, labels.shape[1]
        if sequence is not None and rows == length:
            self._check_whole(labels, sequence)
        return length >= 2 and (rows == length or (sequence is not None and sequence.is_piece(rows, length)))

    def _check_whole(self, labels: Tensor, sequence: SequenceParallel) -> None:
        """Refuse labels of pieces of a sequence: inside of a piece, the next label is not that of the next
        token.
        """
        told = everyone(fingerprint(labels), sequence.axes, sequence.mesh) if can_compare(labels) else []
        if any(found != told[0][1] for _, found in told):
            raise ValueError(
                "GPTLMLoss shifts the labels and needs those of the whole sequence, but the ranks that share"
                f" a sequence were given different ones, of shape {tuple(labels.shape)}; give all of them the"
                " labels of the whole batch, or shift and cut them yourself and use CrossEntropyLoss"
            )
