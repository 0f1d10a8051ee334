"""Writers of numbers: to a file of JSON lines, to TensorBoard, to Weights & Biases.

A script of its own loop calls ``writer.log({"loss": loss}, step)``; the trainer's hooks call the same.
"""

from __future__ import annotations

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class MetricWriter(ABC):
    """Writes numbers by name and step.  Use one on the rank that has them, usually the first."""

    @abstractmethod
    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Write ``values``, numbers or tensors of one element, of the iteration ``step``."""

    def close(self) -> None:  # noqa: B027 - a writer may have nothing to finish
        """Write what waits, and let the file or connection go."""

    def __enter__(self) -> MetricWriter:
        return self

    def __exit__(self, *details: Any) -> None:
        self.close()


class JSONLinesWriter(MetricWriter):
    """Writes a line ``{"step": 3, "time": ..., "loss": 2.5}`` for each call, at once.

    A run that goes on appends to the file. A number that is not finite is written as a string (``"nan"``),
    for which JSON has no number.
    """

    def __init__(self, file: str | Path) -> None:
        path = Path(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        numbers = {name: _json_number(value) for name, value in values.items()}
        self._file.write(json.dumps({"step": step, "time": round(time.time(), 3), **numbers}) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorboardWriter(MetricWriter):
    """Writes for TensorBoard, to files in ``folder``; ``summary`` is torch's ``SummaryWriter``."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "TensorBoard needs the package tensorboard; install it: pip install tensorboard"
            ) from error
        self.summary = SummaryWriter(log_dir=str(folder))

    def log(self, values: Mapping[str, Any], step: int) -> None:
        for name, value in values.items():
            self.summary.add_scalar(name, float(value), step)

    def flush(self) -> None:
        self.summary.flush()

    def close(self) -> None:
        self.summary.close()


class WandbWriter(MetricWriter):
    """Writes to Weights & Biases; ``options`` are those of ``wandb.init`` (``project``, ``name``,
    ``mode='offline'`` ...).
    """

    def __init__(self, **options: Any) -> None:
        self._run = import_wandb().init(**options)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        self._run.log({name: float(value) for name, value in values.items()}, step=step)

    def close(self) -> None:
        self._run.finish()


def import_wandb() -> Any:
    """The package wandb, which is not installed with colossalai."""
    try:
        import wandb
    except ImportError as error:
        raise ImportError("WandbWriter needs the package wandb; install it: pip install wandb") from error
    return wandb


def _json_number(value: Any) -> float | str:
    number = float(value.detach() if hasattr(value, "detach") else value)  # torch warns of a gradient
    return number if math.isfinite(number) else str(number)
