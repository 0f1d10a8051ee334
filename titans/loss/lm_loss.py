"""The loss of a language model: how surprised it is by each next token, in nats."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class GPTLMLoss(nn.Module):
    """Mean cross entropy of token ``t + 1`` under the logits at ``t``.

    ``labels`` are the input ids themselves (the shift happens here); a label equal to ``ignore_index``, for
    example at padding, does not count.
    """

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        if logits.shape[:-1] != labels.shape or labels.shape[-1] < 2:
            raise ValueError(
                "GPTLMLoss needs logits of shape (batch, sequence, vocab) and labels of shape "
                f"(batch, sequence) with at least 2 tokens per row, got {tuple(logits.shape)} and "
                f"{tuple(labels.shape)}"
            )
        logits = logits[..., :-1, :].flatten(0, -2)  # (batch * (seq - 1), vocab)
        labels = labels[..., 1:].flatten()  # (batch * (seq - 1),)
        return cross_entropy(logits, labels, ignore_index=self.ignore_index)
