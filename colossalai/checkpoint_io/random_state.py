"""The random states of a rank: Python's, numpy's, torch's and the streams of the parallel modes.

Under the same plan every rank goes on drawing where it stopped.  Under another one there is no such place, as there are other ranks;
then all streams start anew, from a seed that follows from the checkpoint, as a launch with that seed would start them.
"""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colossalai.checkpoint_io.values import decode, encode
from colossalai.context import ParallelMode
from colossalai.context.random import get_current_mode, get_seeds, get_states, set_mode, set_seed_states
from colossalai.core import global_context as gpc


def capture() -> Tensor:
    """All states of this rank, as bytes."""
    mode = get_current_mode()
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if _uses_cuda() else None,
        "streams": {m.name: state for m, state in get_states(copy=True).items()} if get_seeds() else {},
        "mode": None if mode is None else mode.name,
    }
    text = json.dumps(encode(states, "random state"))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def restore(raw: Tensor) -> None:
    """Go on where ``capture`` was called."""
    states = decode(json.loads(raw.numpy().tobytes()), "random state")
    known = {mode.name: mode for mode in get_seeds()}
    for name, state in states["streams"].items():
        if name in known:
            set_seed_states(known[name], state)
    if states["mode"] in known:
        set_mode(known[states["mode"]])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and _uses_cuda():
        torch.cuda.set_rng_state(states["cuda"])


def start_anew(seed: int) -> None:
    """Start all streams from ``seed``, as a launch does."""
    if gpc.is_initialized(ParallelMode.GLOBAL):
        gpc.set_seed(seed)
        return
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def device_kind() -> str:
    """What the streams are drawn on: the states of one kind mean nothing to the other."""
    return "cuda" if _uses_cuda() else "cpu"


def _uses_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
