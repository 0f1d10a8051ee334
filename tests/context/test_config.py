from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest

from colossalai.context import Config, ConfigException


def test_keys_are_attributes_at_every_depth() -> None:
    config = Config({"parallel": {"tensor": {"size": 4}}}, BATCH_SIZE=32)
    assert config.parallel.tensor.size == 4
    assert config.BATCH_SIZE == config["BATCH_SIZE"] == 32
    assert isinstance(config.parallel.tensor, Config)
    assert isinstance(config, dict)


def test_missing_key_is_an_attribute_error_that_lists_the_keys() -> None:
    config = Config(BATCH_SIZE=32)
    assert not hasattr(config, "LOG_PATH")
    assert getattr(config, "gradient_accumulation", 1) == 1
    with pytest.raises(AttributeError, match=r"no key 'LOG_PATH'; its keys are \['BATCH_SIZE'\]"):
        _ = config.LOG_PATH
    with pytest.raises(AttributeError, match="no key 'LOG_PATH'"):
        del config.LOG_PATH


def test_every_way_to_write_makes_nested_dicts_attributes() -> None:
    config = Config()
    config.a = {"x": 1}
    config["b"] = {"x": 2}
    config.update({"c": {"x": 3}}, d={"x": 4})
    config |= {"e": {"x": 5}}
    assert config.setdefault("f", {"x": 6}).x == 6
    assert [config[key].x for key in "abcdef"] == [1, 2, 3, 4, 5, 6]
    del config.a
    assert "a" not in config


def test_the_documented_way_to_build_a_model_from_its_section() -> None:
    config = Config(model={"type": dict, "depth": 12})
    assert config.model.pop("type")(**config.model) == {"depth": 12}


def test_the_dict_of_the_user_is_not_changed() -> None:
    section = {"pipeline": 2}
    config = Config(parallel=section)
    config.parallel.pipeline = 4
    assert section == {"pipeline": 2}


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c)), Config.copy]
)
def test_copies_are_configs(again) -> None:
    config = Config(parallel={"pipeline": 2})
    assert again(config) == config
    assert again(config).parallel.pipeline == 2


PYTHON_CONFIG = """
from __future__ import annotations
import math
from dataclasses import dataclass
from neighbour_of_config import WIDTH, loss

class Unused: ...

@dataclass
class AlsoUnused:
    x: int = 0

BATCH_SIZE = 8
HIDDEN = WIDTH * 2
_private = 1
fp16 = dict(mode="naive")
"""


def test_a_python_file_gives_its_plain_variables(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_config.py").write_text("WIDTH = 21\ndef loss(): ...\n")
    (tmp_path / "config.py").write_text(PYTHON_CONFIG)
    config = Config.from_file(tmp_path / "config.py")
    assert sorted(config) == ["BATCH_SIZE", "HIDDEN", "WIDTH", "_private", "dataclass", "fp16", "loss"]
    assert config.HIDDEN == 42
    assert config.fp16.mode == "naive"


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "config.py"
    for value in (1, 2):
        path.write_text(f"X = {value}\n")
        assert value == Config.from_file(str(path)).X
    assert [p.name for p in tmp_path.iterdir()] == ["config.py"]  # no bytecode left beside it


def test_a_json_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"parallel": {"pipeline": 2}, "LR": 0.1}))
    assert Config.from_file(path) == {"parallel": {"pipeline": 2}, "LR": 0.1}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.py", "X = 1\nY = (\n", r"cannot read the config '.*c\.py', line 2: SyntaxError"),
        ("c.py", "X = 1\n\nY = X / 0\n", r"c\.py', line 3: ZeroDivisionError: division by zero"),
        ("c.py", "import no_such_module_here\n", r"line 1: ModuleNotFoundError: .*no_such_module_here"),
        ("c.py", "import json\njson.loads('')\n", r"c\.py', line 1: JSONDecodeError"),
        ("c.json", "{", r"c\.json', line 1: JSONDecodeError"),
        ("c.json", "[1]", r"c\.json': TypeError: the file must hold one object \{\.\.\.\}, got list"),
        (
            "c.toml",
            "X = 1",
            r"'.*c\.toml': give a file that ends in \.py or \.json or \.yaml or \.yml, or a dict",
        ),
    ],
)
def test_an_unreadable_file_says_where_and_why(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigException, match=message):
        Config.from_file(tmp_path / name)


def test_a_missing_file_is_named_with_its_full_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        FileNotFoundError, match=rf"no config file 'nowhere\.py' \(looked for {tmp_path}/nowhere\.py\)"
    ):
        Config.from_file("./nowhere.py")
