"""The loss that the configs of GPT name, ``loss_fn = dict(type=vocab_parallel_cross_entropy)``.

It is a class: ``gpc.config.loss_fn.pop('type')(**gpc.config.loss_fn)`` builds the criterion.  The loss of a
language model takes logits that hold every word of the vocabulary, or this rank's part of it.
"""

from __future__ import annotations

from titans.loss.lm_loss import GPTLMLoss

vocab_parallel_cross_entropy = GPTLMLoss
