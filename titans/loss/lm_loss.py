"""The loss of a language model: how surprised it is by each next token, in nats."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import pad

from colossalai.nn import CrossEntropyLoss


class GPTLMLoss(nn.Module):
    """Mean cross entropy of token ``t + 1`` under the logits at ``t``.

    ``labels`` are the input ids themselves (the shift happens here); a label equal to ``ignore_index``, for
    example at padding, does not count.  Under tensor parallelism ``logits`` are what the model returns on
    this rank, and ``labels`` those of the whole batch.
    """

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.loss = CrossEntropyLoss(ignore_index=ignore_index)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        if logits.ndim != 3 or labels.ndim != 2 or not logits.shape[1] == labels.shape[1] >= 2:
            raise ValueError(
                "GPTLMLoss needs logits of shape (batch, sequence, vocab) and labels of shape "
                f"(batch, sequence) with at least 2 tokens per row, got {tuple(logits.shape)} and "
                f"{tuple(labels.shape)}"
            )
        # The labels are shifted rather than the logits cut, which would copy them; the last logits have no
        # label.
        labels = pad(labels[..., 1:], (0, 1), value=self.ignore_index)  # (batch, seq)
        return self.loss(logits, labels)
