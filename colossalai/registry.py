"""A registry turns a name in a configuration into a class: ``type='MyHook'`` finds the class ``MyHook``.

Names are looked up among the registered classes first, then in the third-party libraries of the registry,
which are imported only at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T", bound=Callable[..., Any])


class Registry:
    """Classes (or functions that build things) by name.

    ``third_party_library`` lists modules, or their import names, whose public callables are found as well.
    A library given by name may be absent: its names are then simply unknown.
    """

    def __init__(self, name: str, third_party_library: Sequence[str | ModuleType] | None = None) -> None:
        self._name = name
        self._modules: dict[str, Callable[..., Any]] = {}
        self._libraries = tuple(third_party_library or ())

    @property
    def name(self) -> str:
        return self._name

    def register_module(self, module_class: T) -> T:
        """Register a class under its ``__name__`` and return it, so this works as a decorator.

        Running the same definition again (a reloaded module, a notebook cell) replaces the old class; two
        different definitions with one name are refused.
        """
        key = getattr(module_class, "__name__", None)
        if not callable(module_class) or key is None:
            raise TypeError(
                f"registry {self._name!r} takes a class or a function, got {module_class!r}; "
                f"write @REGISTRY.register_module above the definition, without parentheses"
            )
        known = self._modules.get(key)
        if known is not None and _origin(known) != _origin(module_class):
            raise ValueError(
                f"registry {self._name!r} already has {key!r} from {_origin(known)}; "
                f"rename the one in {_origin(module_class)}"
            )
        self._modules[key] = module_class
        return module_class

    def get_module(self, module_name: str) -> Callable[..., Any]:
        """The class registered as ``module_name``, or the callable of that name in a third-party library."""
        found = self._find(module_name)
        if found is None:
            raise ValueError(self._unknown(module_name))
        return found

    def has(self, module_name: str) -> bool:
        """Whether ``get_module`` would find ``module_name``."""
        return self._find(module_name) is not None

    def __contains__(self, module_name: str) -> bool:
        return self.has(module_name)

    def __repr__(self) -> str:
        return f"Registry({self._name!r}: {', '.join(self._modules) or 'empty'})"

    def _find(self, key: str) -> Callable[..., Any] | None:
        if key in self._modules:
            return self._modules[key]
        for library in self._loaded_libraries():
            if not key.startswith("_") and callable(value := getattr(library, key, None)):
                return value
        return None

    def _loaded_libraries(self) -> list[ModuleType]:
        libraries = []
        for library in self._libraries:
            if isinstance(library, str):
                try:
                    library = import_module(library)
                except ModuleNotFoundError as error:
                    if error.name != library.partition(".")[0]:
                        raise  # the library is there, but something it needs is not
                    continue
            libraries.append(library)
        return libraries

    def _unknown(self, key: str) -> str:
        names = list(self._modules)
        for library in self._loaded_libraries():
            names += [n for n in vars(library) if not n.startswith("_") and callable(getattr(library, n))]
        close = get_close_matches(key, names, n=1)
        if close:
            hint = f"did you mean {close[0]!r}?"
        else:
            hint = f"registered are: {', '.join(self._modules) or 'none'}"
        return (
            f"registry {self._name!r} has no {key!r}; {hint} "
            f"(a class registers when the module that defines it is imported)"
        )


def _origin(module_class: Any) -> str:
    return f"{getattr(module_class, '__module__', '?')}.{getattr(module_class, '__qualname__', '?')}"


# ---- The registries that configurations are read with; users add their own classes to them ----

LAYERS = Registry("layers", third_party_library=["torch.nn"])
LOSSES = Registry("losses", third_party_library=["torch.nn"])
MODELS = Registry("models", third_party_library=["torchvision.models"])
OPTIMIZERS = Registry("optimizers", third_party_library=["torch.optim"])
LR_SCHEDULERS = Registry("lr_schedulers", third_party_library=["torch.optim.lr_scheduler"])
DATASETS = Registry("datasets", third_party_library=["torchvision.datasets"])
TRANSFORMS = Registry("transforms", third_party_library=["torchvision.transforms"])
DATA_SAMPLERS = Registry("data_samplers", third_party_library=["torch.utils.data"])
DIST_GROUP_INITIALIZER = Registry("dist_group_initializer")
GRADIENT_HANDLER = Registry("gradient_handler")
HOOKS = Registry("hooks")
OPHOOKS = Registry("ophooks")
SCHEDULE = Registry("schedule")

__all__ = [
    "DATASETS",
    "DATA_SAMPLERS",
    "DIST_GROUP_INITIALIZER",
    "GRADIENT_HANDLER",
    "HOOKS",
    "LAYERS",
    "LOSSES",
    "LR_SCHEDULERS",
    "MODELS",
    "OPHOOKS",
    "OPTIMIZERS",
    "SCHEDULE",
    "TRANSFORMS",
    "Registry",
]
