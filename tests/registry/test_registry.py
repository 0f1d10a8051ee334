from __future__ import annotations

import types

import pytest
import torch

from colossalai import registry
from colossalai.registry import Registry

DOCUMENTED = [
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
]


def test_a_decorated_class_is_found_and_unchanged() -> None:
    things = Registry("things")

    @things.register_module
    class Thing:
        pass

    assert isinstance(Thing, type)
    assert things.get_module("Thing") is Thing
    assert things.has("Thing")
    assert "Thing" in things
    assert not things.has("Other")


def test_a_function_can_be_registered_by_a_call() -> None:
    things = Registry("things")

    def build() -> int:
        return 3

    assert things.register_module(build) is build
    assert things.get_module("build")() == 3


def test_documented_registries_exist_and_are_separate() -> None:
    names = [name for name, value in vars(registry).items() if isinstance(value, Registry)]
    assert sorted(names) == sorted(DOCUMENTED)
    assert len({getattr(registry, name).name for name in names}) == 13


def test_third_party_names_are_found() -> None:
    assert registry.LAYERS.get_module("Linear") is torch.nn.Linear
    assert registry.OPTIMIZERS.get_module("AdamW") is torch.optim.AdamW
    library = types.ModuleType("library")
    library.build = dict  # type: ignore[attr-defined]
    assert Registry("things", third_party_library=[library]).get_module("build") is dict


def test_own_classes_come_before_third_party_ones() -> None:
    layers = Registry("layers", third_party_library=["torch.nn"])

    @layers.register_module
    class Linear:
        pass

    assert layers.get_module("Linear") is Linear


def test_modules_and_private_names_of_a_library_are_not_classes() -> None:
    assert not registry.LAYERS.has("functional")
    assert not registry.LAYERS.has("__name__")


def test_an_absent_library_is_skipped() -> None:
    assert not Registry("things", third_party_library=["no_such_library.models"]).has("Thing")


def test_a_broken_library_is_not_hidden(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "broken_library.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        Registry("things", third_party_library=["broken_library"]).has("Thing")


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(ValueError, match=r"registry 'layers' has no 'Lineer'; did you mean 'Linear'\?"):
        registry.LAYERS.get_module("Lineer")


def test_an_unknown_name_with_nothing_near_lists_what_there_is() -> None:
    things = Registry("things")
    with pytest.raises(ValueError, match="registered are: none"):
        things.get_module("zzz")
    things.register_module(dict)
    with pytest.raises(ValueError, match="registered are: dict"):
        things.get_module("zzz")


def test_two_definitions_of_one_name_are_refused() -> None:
    things = Registry("things")
    things.register_module(types.new_class("Thing", exec_body=lambda ns: ns.update(__module__="a")))
    with pytest.raises(
        ValueError, match=r"registry 'things' already has 'Thing' from a\.Thing; rename .* b\.Thing"
    ):
        things.register_module(types.new_class("Thing", exec_body=lambda ns: ns.update(__module__="b")))


def test_running_a_definition_again_replaces_it() -> None:
    things = Registry("things")

    def define() -> type:
        @things.register_module
        class Thing:
            pass

        return Thing

    first, second = define(), define()
    assert first is not second
    assert things.get_module("Thing") is second


def test_something_without_a_name_is_refused() -> None:
    with pytest.raises(TypeError, match="registry 'things' takes a class or a function, got 3"):
        Registry("things").register_module(3)  # type: ignore[type-var]
