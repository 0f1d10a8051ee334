"""The loss that the configs of GPT name, ``loss_fn = dict(type=vocab_parallel_cross_entropy)``, for whole logits.

It is a class: ``gpc.config.loss_fn.pop('type')(**gpc.config.loss_fn)`` builds the criterion.  With logits that hold every
word of the vocabulary it is the loss of any language model.
"""

from __future__ import annotations

from titans.loss.lm_loss import GPTLMLoss

vocab_parallel_cross_entropy = GPTLMLoss
