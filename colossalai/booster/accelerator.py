"""The device that this process computes on."""

from __future__ import annotations

import torch
from torch import nn

SUPPORTED_DEVICES = ("cpu", "cuda")


class Accelerator:
    """A device by name; without one, CUDA where it is present and the CPU elsewhere.

    ``cuda`` without a number is the current CUDA device, which ``colossalai.launch`` has chosen by local
    rank.
    """

    def __init__(self, device: str | torch.device | None = None) -> None:
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        name = str(device)
        if name.split(":")[0] not in SUPPORTED_DEVICES:
            raise ValueError(
                f"device {name!r} is not supported; choose one of {', '.join(SUPPORTED_DEVICES)}, or leave it"
                " out"
            )
        chosen = torch.device(device)
        if chosen.type == "cuda":
            if not torch.cuda.is_available():
                raise RuntimeError(
                    f"device {name!r} was asked for, but torch sees no CUDA device; use device='cpu', or"
                    " leave it out"
                )
            if chosen.index is None:
                chosen = torch.device("cuda", torch.cuda.current_device())
            elif chosen.index >= torch.cuda.device_count():
                raise ValueError(
                    f"device {name!r} was asked for, but torch sees {torch.cuda.device_count()} CUDA"
                    " device(s)"
                )
        self.device = chosen

    @classmethod
    def of_plan(cls, device: torch.device | None) -> Accelerator:
        """The device that a plan has chosen, which is not checked again; the default one for ``None``."""
        if device is None:
            return cls()
        made = cls.__new__(cls)
        made.device = device
        return made

    def bind(self) -> None:
        """Make it the device that new CUDA tensors of this process go to."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def configure_model(self, model: nn.Module) -> nn.Module:
        """Put ``model`` on the device; an optimizer made before still holds its parameters."""
        return model.to(self.device)

    def __repr__(self) -> str:
        return f"Accelerator({str(self.device)!r})"
