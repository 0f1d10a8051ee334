"""What a module is, put back after code has run that changes it."""

from __future__ import annotations

from torch import nn


class KeptAttributes:
    """The attributes of a module, and what lies in those that are lists or dicts.

    All of them: code may keep in one that it has put something into another, such as hooks that it gives to
    its modules in their first forward pass.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = dict(module.__dict__)
        # parameters, buffers, children and hooks are among them, and the lists of weights of an RNN
        self._contents = [(v, v.copy()) for v in module.__dict__.values() if isinstance(v, (list, dict))]

    def restore(self) -> None:
        """Make the module what it was when this was made."""
        self._module.__dict__.clear()
        self._module.__dict__.update(self._attributes)
        for container, content in self._contents:
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)
