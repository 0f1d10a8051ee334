"""The loss that the configs of GPT name, ``loss_fn = dict(type=vocab_parallel_cross_entropy)``.

It is a class: ``gpc.config.loss_fn.pop('type')(**gpc.config.loss_fn)`` builds the criterion.  It takes the logits of
a language model whether each rank holds all words or some.
"""

from __future__ import annotations

from titans.loss.lm_loss import GPTLMLoss

vocab_parallel_cross_entropy = GPTLMLoss
