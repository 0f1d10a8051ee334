from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from colossalai.context import Config, ConfigException
from colossalai.context.config_schema import check_config, load_config
from colossalai.context.spelling import misspelt, suggestion
from colossalai.logging import get_dist_logger


@pytest.mark.parametrize("config", [None, {}, Config(), {"BATCH_SIZE": 32}])
def test_forms_of_a_config(config: Any) -> None:
    assert load_config(config) == (config or {})


DOCUMENTED = {
    "parallel": {"pipeline": 2},
    "fp16": {"mode": "naive", "initial_scale": 256},
    "zero": {"level": 3},
    "torch_ddp": {"static_graph": True},
    "gradient_handlers": [{"type": "MyHandler", "arg1": 1}],
    "gradient_accumulation": 4,
    "clip_grad_norm": 1.0,
    "cudnn_benchmark": False,
    "cudnn_deterministic": True,
    "model": {"type": dict, "num_chunks": 2},
    "NUM_MICRO_BATCHES": 4,
}


def test_every_documented_key_is_accepted_and_reachable() -> None:
    config = load_config(DOCUMENTED)
    assert config.model.num_chunks == 2
    assert list(config) == list(DOCUMENTED)


@pytest.mark.parametrize("key", DOCUMENTED)
def test_none_means_not_set(key: str) -> None:
    assert load_config({key: None})[key] is None


# Names in the documents' configs, and others that differ little from a reserved word but are words of their
# own.
HYPER_PARAMETERS = (
    "BATCH_SIZE LEARNING_RATE NUM_EPOCHS SEQ_LEN SEQ_LENGTH HIDDEN_SIZE GRADIENT_ACCUMULATION MODEL"
    " GRADIENT_CLIPPING TENSOR_PARALLEL_SIZE TENSOR_PARALLEL_MODE CHECKPOINT DEPTH dali optimizer loss_fn"
    " hooks mode models bf16 fp8 zeros zero_stage model_name pretrained_model parallel_output"
    " gradient_accumulation_steps lr"
)


@pytest.mark.parametrize("key", HYPER_PARAMETERS.split())
def test_other_names_are_hyper_parameters(key: str) -> None:
    assert getattr(load_config({key: 3}), key) == 3


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("paralel", "parallel"),  # codespell:ignore
        ("Parallel", "parallel"),
        ("PARALLEL", "parallel"),
        ("paralell", "parallel"),  # codespell:ignore
        ("parrallel", "parallel"),  # codespell:ignore
        ("praallel", "parallel"),
        ("fp_16", "fp16"),
        ("FP16", "fp16"),
        ("fp61", "fp16"),
        ("Zero", "zero"),
        ("modle", "model"),  # codespell:ignore
        ("clip_grad_nrom", "clip_grad_norm"),
        ("clipgradnorm", "clip_grad_norm"),
        ("clip_grad_norms", "clip_grad_norm"),
        ("gradient_acumulation", "gradient_accumulation"),
        ("gradient_accumulaton", "gradient_accumulation"),
        ("gradient_handeler", "gradient_handler"),
        ("cudnn_benchmrk", "cudnn_benchmark"),
        ("cudnn-deterministic", "cudnn_deterministic"),
        ("torch_dpp", "torch_ddp"),
        ("clip_grad", "clip_grad_norm"),
        ("Clip_Grad", "clip_grad_norm"),
        ("gradient_clipping", "clip_grad_norm"),
        ("max_grad_norm", "clip_grad_norm"),
        ("clip_norm", "clip_grad_norm"),
    ],
)
def test_a_misspelt_feature_is_refused_with_the_right_word(key: str, meant: str) -> None:
    with pytest.raises(ConfigException, match=rf"key '{key}' is not a feature; did you mean '{meant}'\?"):
        load_config({key: {"pipeline": 2}})


CAPITALS = ["FP16", "ZERO", "GRADIENT_ACCUMULATION", "CLIP_GRAD_NORM", "GRADIENT_CLIPPING", "CUDNN_BENCHMARK"]


@pytest.mark.parametrize("key", CAPITALS)
def test_a_feature_in_capitals_is_a_hyper_parameter_and_said_to_be(
    key: str, caplog: pytest.LogCaptureFixture
) -> None:
    get_dist_logger()._warned.clear()
    load_config({key: 1})
    load_config({key: 1})
    said = [m for m in caplog.messages if f"{key!r} is a hyper-parameter, by its capitals, and switches" in m]
    assert len(said) == 1
    caplog.clear()
    load_config({name: 1 for name in HYPER_PARAMETERS.split() if name not in CAPITALS})
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("parallel", 4, "'parallel' must be a dict, got int 4"),
        ("fp16", True, "'fp16' must be a dict, got bool True"),
        ("zero", "3", "'zero' must be a dict, got str '3'"),
        ("clip_grad_norm", "1.0", "'clip_grad_norm' must be a number that is not negative, got str '1.0'"),
        ("clip_grad_norm", True, "'clip_grad_norm' must be a number that is not negative, got bool True"),
        ("clip_grad_norm", -1.0, "'clip_grad_norm' must be a number that is not negative, got float -1.0"),
        ("gradient_accumulation", 0, "'gradient_accumulation' must be a positive integer, got int 0"),
        ("gradient_accumulation", 2.0, "'gradient_accumulation' must be a positive integer, got float 2.0"),
        ("gradient_accumulation", True, "'gradient_accumulation' must be a positive integer, got bool True"),
        ("gradient_handler", {"type": "A"}, "'gradient_handler' must be a list of dicts that have a 'type'"),
        ("gradient_handlers", ["A"], "'gradient_handlers' must be a list of dicts that have a 'type'"),
        ("cudnn_benchmark", 1, "'cudnn_benchmark' must be True or False, got int 1"),
        ("cudnn_benchmark", (False,), r"got tuple \(False,\); is there a comma at the end of the line\?"),
        ("NUM_MICRO_BATCHES", "4", "'NUM_MICRO_BATCHES' must be a positive integer, got str '4'"),
    ],
)
def test_a_wrong_type_is_refused(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigException, match=message):
        load_config({key: value})


def test_the_two_names_of_gradient_handlers_exclude_each_other() -> None:
    handlers = [{"type": "A"}]
    with pytest.raises(ConfigException, match="has both 'gradient_handler' and 'gradient_handlers'"):
        load_config({"gradient_handler": handlers, "gradient_handlers": handlers})
    assert load_config({"gradient_handler": handlers, "gradient_handlers": None}).gradient_handler == handlers


def test_other_things_than_a_config_are_refused() -> None:
    with pytest.raises(ConfigException, match=r"config must be a dict, .* got list: \['parallel'\]"):
        load_config(["parallel"])  # type: ignore[arg-type]
    with pytest.raises(ConfigException, match="config keys are names, got the int 1"):
        load_config({1: 2})  # type: ignore[dict-item]


def test_suggestions() -> None:
    assert suggestion("tensors", ["data", "tensor"]) == "did you mean 'tensor'? known: 'data', 'tensor'"
    assert suggestion("qqq", ["data", "tensor"]) == "known: 'data', 'tensor'"
    assert misspelt("parallel", ["parallel"]) is None


@pytest.mark.parametrize("config", [{"tensor": {"size": 2, "mode": "1d"}}, {"pipeline": 2}, {"tensor": 4}])
def test_sizes_one_level_too_high_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigException, match=r"stands one level too high: write parallel=dict\("):
        check_config(Config(config))


def test_a_hyper_parameter_may_share_their_names() -> None:
    check_config(Config({"tensor": "fp32", "pipeline": ["resize", "crop"], "data": 3}))


def test_a_config_file_that_exits_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "config.py"
    file.write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(ConfigException, match=r"line 2: SystemExit: 3"):
        Config.from_file(file)
