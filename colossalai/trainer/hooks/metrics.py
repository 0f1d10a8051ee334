"""The metrics of the trainer.

A metric collects on its own rank and, at the end of an epoch, is brought together over the ranks that hold
other data: the trainer calls ``synchronize`` on every rank at once.  After that its values can be read
anywhere, without communication.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.utils import get_current_device
from colossalai.utils.parallel import row_mode
from colossalai.utils.throughput import share_of_peak, work_text


class Metric(ABC):
    """A number that is updated in each iteration.

    Args:
        epoch_only: it means something at the end of an epoch only.
    """

    def __init__(self, epoch_only: bool) -> None:
        self.epoch_only = epoch_only

    @abstractmethod
    def reset(self) -> None:
        """Forget everything, at the start of an epoch."""

    @abstractmethod
    def update(self, *args: Any, **kwargs: Any) -> None:
        """Take in one iteration."""

    @abstractmethod
    def get_last_step_value(self) -> float:
        """The value of the last iteration, on this rank."""

    @abstractmethod
    def get_accumulated_value(self) -> float:
        """The value over all iterations since ``reset``; over all ranks once the epoch has ended."""

    @staticmethod
    @abstractmethod
    def is_better(a: float, b: float) -> bool:
        """Whether ``a`` is better than ``b``."""

    def synchronize(self) -> None:  # noqa: B027 - a metric of one rank has nothing to bring together
        """Bring the ranks' values together; every rank calls this at the end of an epoch."""

    def describe_last_step(self) -> str:
        return format_number(self.get_last_step_value())

    def describe_accumulated(self) -> str:
        return format_number(self.get_accumulated_value())

    def further_values(self, accumulated: bool) -> dict[str, float]:
        """What else is known of the last iteration, or of all, by its name, for those who write metrics."""
        return {}


class LossMetric(Metric):
    """The mean of the losses, each iteration of each rank counting the same."""

    def __init__(self, epoch_only: bool) -> None:
        super().__init__(epoch_only)
        self.reset()

    def reset(self) -> None:
        self._last = torch.full((), float("nan"), device=get_current_device())
        self._sum = torch.zeros((), device=get_current_device())
        self._count = 0.0

    def update(self, loss: Tensor) -> None:
        self._last = loss.detach().float().reshape(())
        self._sum = self._sum.to(self._last.device) + self._last
        self._count += 1

    def synchronize(self) -> None:
        self._sum, count = sum_over_model_and_data(self._sum, self._count)
        self._count = float(count)

    def get_last_step_value(self) -> float:
        return float(self._last)

    def get_accumulated_value(self) -> float:
        return float(self._sum) / self._count if self._count else float("nan")

    @staticmethod
    def is_better(a: float, b: float) -> bool:
        return a < b


class LearningRateMetric(Metric):
    """The learning rate that the next iteration will use."""

    def __init__(self, epoch_only: bool, initial_lr: float = 0.0) -> None:
        super().__init__(epoch_only)
        self.lr = initial_lr

    def reset(self) -> None:
        pass  # a learning rate does not start again with an epoch

    def update(self, lr: float) -> None:
        self.lr = lr

    def get_last_step_value(self) -> float:
        return self.lr

    def get_accumulated_value(self) -> float:
        return self.lr

    @staticmethod
    def is_better(a: float, b: float) -> bool:
        return False  # no learning rate is better than another


class AccuracyMetric(Metric):
    """Correct predictions per label.

    Args:
        accuracy_func: the number of correct predictions, from outputs and labels.
    """

    def __init__(self, epoch_only: bool, accuracy_func: Callable[[Any, Any], Tensor | int]) -> None:
        super().__init__(epoch_only)
        self.acc = accuracy_func
        self.reset()

    def reset(self) -> None:
        zero = torch.zeros((), device=get_current_device())
        self._last_correct, self._last_total = zero, 0
        self._correct, self._total = zero.clone(), 0.0

    def update(self, logits: Any, targets: Any, batch_size: int) -> None:
        correct = torch.as_tensor(self.acc(logits, targets)).float()
        self._last_correct, self._last_total = correct, batch_size
        self._correct = self._correct.to(correct.device) + correct
        self._total += batch_size

    def synchronize(self) -> None:
        self._correct, total = sum_over_model_and_data(self._correct, self._total)
        self._total = float(total)

    def get_last_step_value(self) -> float:
        return float(self._last_correct) / self._last_total if self._last_total else float("nan")

    def get_accumulated_value(self) -> float:
        return float(self._correct) / self._total if self._total else float("nan")

    @staticmethod
    def is_better(a: float, b: float) -> bool:
        return a > b


class ThroughputMetric(Metric):
    """Samples and tokens per second, of this rank with ``use_local`` and of all data-parallel ranks
    otherwise.

    Args:
        ignored_steps: iterations at the start of each epoch that do not count.
        tflop_per_step: floating-point operations of one iteration of this rank, in units of 10**12, unless
            ``update`` is told; if known, TFLOPS are shown, and their share of the device's peak (MFU).
    """

    def __init__(
        self,
        epoch_only: bool,
        ignored_steps: int = 0,
        tflop_per_step: float = 0,
        use_local: bool = False,
    ) -> None:
        super().__init__(epoch_only)
        self.ignored_steps = ignored_steps
        self.tflop_per_step = tflop_per_step
        self.use_local = use_local
        self.reset()

    def reset(self) -> None:
        self._seen = 0
        self._steps = 0
        self._samples = self._tokens = self._tflop = self._seconds = 0.0
        self._last_samples, self._last_tokens, self._last_tflop, self._last_seconds = 0.0, 0.0, 0.0, 0.0

    def update(self, num_samples: int, time: float, tokens: int = 0, tflop: float = 0) -> None:
        self._seen += 1
        # ranks keep step with each other, so during an epoch the others are taken to be like this one
        replicas = 1 if self.use_local else data_size()
        self._last_samples, self._last_seconds = float(num_samples * replicas), time
        self._last_tokens, self._last_tflop = float(tokens * replicas), tflop or self.tflop_per_step
        if self._seen > self.ignored_steps:
            self._steps += 1
            self._samples += self._last_samples
            self._tokens += self._last_tokens
            self._tflop += self._last_tflop
            self._seconds += time

    def synchronize(self) -> None:
        if self.use_local or data_size() == 1:
            return
        replicas = data_size()
        own = [self._samples / replicas, self._tokens / replicas, self._seconds]
        values = torch.tensor(own, device=get_current_device(), dtype=torch.float64)
        self._samples, self._tokens, seconds = sum_over_data(values)[0].tolist()
        self._seconds = seconds / replicas

    def get_last_step_value(self) -> float:
        return self._last_samples / self._last_seconds if self._last_seconds else 0.0

    def get_accumulated_value(self) -> float:
        return self._samples / self._seconds if self._seconds else 0.0

    def get_last_step_info(self) -> str:
        return self.describe_last_step()

    def further_values(self, accumulated: bool) -> dict[str, float]:
        """Tokens and operations per second, and the share of the device's peak, as far as they are known."""
        tokens, tflop, seconds = self._last_tokens, self._last_tflop, self._last_seconds
        if accumulated:
            tokens, tflop, seconds = self._tokens, self._tflop, self._seconds
        tflops = tflop / seconds if seconds else 0.0
        found = {
            "Tokens_per_sec": tokens / seconds if seconds else 0.0,
            "Tflops": tflops,
            "MFU": share_of_peak(tflops) or 0.0,
        }
        return {name: value for name, value in found.items() if value}

    def describe_last_step(self) -> str:
        rate = self.get_last_step_value()
        return self._describe(rate, self._last_tokens, self._last_tflop, self._last_seconds)

    def describe_accumulated(self) -> str:
        return self._describe(self.get_accumulated_value(), self._tokens, self._tflop, self._seconds)

    def _describe(self, rate: float, tokens: float, tflop: float, seconds: float) -> str:
        parts = [f"{format_number(rate)} sample_per_sec"]
        if tokens and seconds:
            parts.append(f"{format_number(tokens / seconds)} token_per_sec")
        if tflop or self.tflop_per_step:
            parts.append(work_text(tflop / seconds if seconds else 0.0))
        return ", ".join(parts)

    @staticmethod
    def is_better(a: float, b: float) -> bool:
        return a > b


def format_number(value: float) -> str:
    """Five digits; whole numbers as they are."""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def data_size() -> int:
    """How many ranks read other data than this one; those of one sequence read the same."""
    return gpc.get_world_size(ParallelMode.DATA) if gpc.is_initialized(ParallelMode.DATA) else 1


def sum_over_data(value: Tensor, count: float = 0.0) -> tuple[Tensor, float]:
    """``value`` and ``count``, summed over the ranks that read other data."""
    return _sum_over((ParallelMode.DATA,), value, count)


def sum_over_model_and_data(value: Tensor, count: float = 0.0) -> tuple[Tensor, float]:
    """The same for a number that one stage of a pipeline has, and the others have as 0 with a count of 0."""
    # also over the ranks of a sequence, for a script that cuts it itself: a mean of equal numbers is the same
    return _sum_over((row_mode(), ParallelMode.PIPELINE), value, count)


def _sum_over(modes: Sequence[ParallelMode], value: Tensor, count: float) -> tuple[Tensor, float]:
    modes = [mode for mode in modes if gpc.is_initialized(mode) and gpc.get_world_size(mode) > 1]
    if not modes:
        return value, count
    both = torch.cat([value.detach().double().reshape(-1), value.new_tensor([count], dtype=torch.float64)])
    for mode in modes:
        dist.all_reduce(both, group=gpc.get_group(mode))
    return both[:-1].view_as(value).to(value.dtype), float(both[-1])
