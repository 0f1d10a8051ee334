"""How long to train, and how fast to learn on the way."""

from __future__ import annotations

import math


class Schedule:
    """A linear warm-up of the learning rate, then half a cosine down to 10% of it.

    ``seconds`` bounds the training on a machine too slow for all ``steps``: the pace so far says how many
    fit.
    """

    def __init__(self, steps: int, seconds: float, first_step: int = 0) -> None:
        self.steps, self.seconds, self.first_step = steps, seconds, first_step
        self.end = steps

    def update(self, step: int, elapsed: float) -> None:
        """Look at the pace; ``elapsed`` must be the same number on every rank."""
        if self.seconds and elapsed > self.seconds / 10:  # the first steps are slower than the rest
            affordable = self.first_step + int(self.seconds / elapsed * (step - self.first_step))
            self.end = min(self.steps, max(affordable, step))

    def factor(self, step: int) -> float:
        warm_up = max(1, self.end // 10)
        if step < warm_up:
            return (step + 1) / warm_up
        progress = min(1.0, (step - warm_up) / max(1, self.end - warm_up))
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))
