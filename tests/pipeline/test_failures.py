"""Bad input and failing stages: a clear error on every rank, soon."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from colossalai.builder import build_pipeline_model, build_pipeline_model_from_cfg
from colossalai.context.config import ConfigException
from colossalai.context.parallel_config import ParallelConfig
from colossalai.mesh import Mesh
from colossalai.mesh.parameter import SHARED_GROUP
from colossalai.nn.layer.wrapper import PipelineSharedModuleWrapper
from colossalai.pipeline.chunks import with_chunks
from colossalai.pipeline.options import PipelineOptions
from colossalai.pipeline.p2p import PipelineError
from colossalai.pipeline.pipeline import Pipeline
from colossalai.pipeline.schedule import make_timetable
from colossalai.pipeline.tied import synchronized_gradients
from colossalai.testing import RankError, fake_world, spawn
from tests.pipeline.plans import HIDDEN, config, launch, problem
from tests.pipeline.test_engine import _engine

SOON = 10.0


class _RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise KeyError("a bug of the user")


class Bad(nn.Module):
    """A stage that does something wrong with micro-batch 1."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layer = nn.Linear(HIDDEN, HIDDEN)
        self.what, self.calls = what, 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        if self.calls == 2:
            if self.what == "raise":
                raise KeyError("a bug of the user")
            if self.what == "die":
                os._exit(0)
            if self.what == "return text":
                return {"hidden": [self.layer(x), "text"]}
            if self.what == "return nothing":
                return None
            if self.what == "raise in backward":
                return _RaiseInBackward.apply(self.layer(x))
        return self.layer(x)


MESSAGES = {
    "raise": (KeyError, "a bug of the user"),
    "raise in backward": (KeyError, "a bug of the user"),
    "return text": (
        TypeError,
        r"pipeline stage 1 returned str at \['hidden'\]\[1\]; all stages but the last return",
    ),
    "return nothing": (TypeError, "pipeline stage 1 returned NoneType; all stages but the last"),
}


def check_failing_stage(
    rank: int, world_size: int, port: int, what: str, schedule: str, evaluates: bool
) -> str:
    chunks = 2 if schedule in ("interleaved", "zbv") else 1
    settings = config(schedule, 4, 4, chunks)
    launch(settings)
    bad = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN), Bad(what)]) if chunks == 2 else Bad(what)
    engine = _engine(settings, model=bad if rank == 1 else None)
    x, y = problem().batches[0]
    start = time.perf_counter()
    with pytest.raises((PipelineError, KeyError, TypeError)) as raised:
        engine.execute_schedule(iter([(x, y)]), forward_only=evaluates)
    assert time.perf_counter() - start < SOON
    if rank == 1:
        kind, message = MESSAGES[what]
        assert raised.type is kind
        raised.match(message)
        return ""
    assert raised.type is PipelineError
    with pytest.raises(PipelineError, match="this pipeline has failed before; start the job again"):
        engine.execute_schedule(iter([(x, y)]))
    return str(raised.value)


@pytest.mark.parametrize(
    ("what", "schedule"),
    [
        ("raise", "1f1b"),
        ("raise", "gpipe"),
        ("raise", "interleaved"),
        ("raise", "zbv"),
        ("raise in backward", "1f1b"),
        ("raise in backward", "zbh1"),
        ("raise in backward", "zbv"),
        ("return text", "1f1b"),
        ("return nothing", "gpipe"),
        ("raise in evaluation", "1f1b"),
        ("raise in evaluation", "zbv"),
    ],
)
def test_a_stage_that_fails_fails_all(what: str, schedule: str) -> None:
    evaluates = what == "raise in evaluation"
    what = "raise" if evaluates else what
    heard = spawn(check_failing_stage, 4, what=what, schedule=schedule, evaluates=evaluates)
    for text in (heard[0], *heard[2:]):
        assert text.startswith(f"pipeline stage 1 (rank 1) failed with {MESSAGES[what][0].__name__}: ")


def check_uncaught(rank: int, world_size: int, port: int) -> None:
    settings = config("1f1b", 4, 4)
    launch(settings)
    engine = _engine(settings, model=Bad("raise") if rank == 2 else None)
    engine.execute_schedule(iter([problem().batches[0]]))


def test_the_report_of_a_failed_job_is_about_the_stage_that_failed() -> None:
    """Its neighbours hear of it and end before it does: it waits until they have taken its words."""
    with pytest.raises(RankError) as raised:
        spawn(check_uncaught, 4)
    assert (raised.value.rank, raised.value.cause_type) == (2, KeyError)


class _DieInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


class Mortal(nn.Linear):
    """A stage whose process ends in its first backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return _DieInBackward.apply(super().forward(x))


class _Trains:
    def expect_gradients(self) -> None: ...

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss


def run_stage(rank: int, store: str, schedule: str, when: str, heard: Any, both: Any) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=3, init_method=f"file://{store}")
    torch.manual_seed(0)
    dying = Mortal(HIDDEN, HIDDEN) if when == "backward" else Bad("die")
    model: nn.Module = dying if rank == 1 else nn.Linear(HIDDEN, HIDDEN)
    if schedule in ("interleaved", "zbv"):
        model = with_chunks(nn.ModuleList([nn.Linear(HIDDEN, HIDDEN), model]))
    pipeline = Pipeline(model, Mesh({"pp": 3}), schedule=schedule, microbatches=6)
    x, _ = problem(12).batches[0]
    trains = None if when == "evaluation" else _Trains()
    start = time.perf_counter()
    try:
        pipeline.step(x, None, lambda output: output.mean(), trains)
    except PipelineError as error:
        heard.put((rank, time.perf_counter() - start, str(error)))
    both.wait(SOON)  # the other one must hear of the death, not of the end of this rank


def check_dead_stage(
    rank: int, world_size: int, port: int, store: str, schedule: str, when: str
) -> list[Any]:
    """The stages are processes of their own here, because ``spawn`` would end all when one dies."""
    fork = multiprocessing.get_context("fork")
    heard, both = fork.Queue(), fork.Barrier(2)
    stages = [fork.Process(target=run_stage, args=(r, store, schedule, when, heard, both)) for r in range(3)]
    for stage in stages:
        stage.start()
    found = [heard.get(timeout=3 * SOON) for _ in range(2)]
    for stage in stages:
        stage.join()
    return sorted(found)


@pytest.mark.parametrize(
    ("schedule", "when"),
    [
        ("1f1b", "evaluation"),
        ("gpipe", "backward"),
        ("interleaved", "forward"),
        ("zbh1", "backward"),
        ("zbv", "backward"),
    ],
)
def test_a_stage_that_dies_fails_all(tmp_path: Path, schedule: str, when: str) -> None:
    (found,) = spawn(check_dead_stage, 1, store=str(tmp_path / "store"), schedule=schedule, when=when)
    assert [rank for rank, *_ in found] == [0, 2]
    for _, seconds, message in found:
        assert seconds < SOON
        assert message.startswith("pipeline stage 1 (rank 1) is gone or cannot be reached")


def check_bad_input(rank: int, world_size: int, port: int) -> None:
    settings = config("1f1b", 2, 3)
    launch(settings)
    engine = _engine(settings)
    with pytest.raises(ValueError, match="a batch of 16 samples cannot be cut into 3 equal micro-batches"):
        engine.execute_schedule(iter([problem().batches[0]]))
    with pytest.raises(ValueError, match="a backward pass needs the loss"):
        engine.execute_schedule(iter([problem(15).batches[0]]), return_loss=False)
    engine.execute_schedule(iter([problem(15).batches[0]]))  # nothing was exchanged, so all is well
    wrong: list[tuple[dict[str, Any], str]] = [
        (config("1f1b", 2, 2, NUM_MICRO_BATCHES=None), "pipeline of 2 stages, but no NUM_MICRO_BATCHES"),
        (config("interleaved", 2, 3, 2), "multiple of the 2 pipeline stages, got 3"),
        (config("2f2b", 2, 3), "there is no pipeline schedule '2f2b'"),
    ]
    for settings, message in wrong:
        with pytest.raises(ConfigException, match=message):
            _engine(settings)
    with pytest.raises(
        ValueError, match=r"the config asks for 1 chunk\(s\) of the model on each rank .*, got 2"
    ):
        _engine(config("1f1b", 2, 2), model=nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]))


def test_bad_input_is_refused_on_every_rank() -> None:
    spawn(check_bad_input, 2)


SIZES = {"SEQ_LENGTH": 8, "GLOBAL_BATCH_SIZE": 16, "HIDDEN_SIZE": 4}
ONE_RANK = ParallelConfig(pipeline=2, data=1)


@pytest.mark.parametrize("key", [*SIZES, "model.num_chunks"])
@pytest.mark.parametrize("wrong", ["x", "1", 2.5, 0, -1, True, [8]])
def test_config_values_that_are_no_numbers(key: str, wrong: Any) -> None:
    own = {"model": {"num_chunks": wrong}} if "." in key else {key: wrong}
    settings = config("1f1b", 2, 2) | SIZES | own
    told = (
        f"config key '{key}' must be a positive integer, got {type(wrong).__name__}"
        f" {re.escape(repr(wrong))}; "
    )
    with pytest.raises(ConfigException, match=told):
        PipelineOptions.from_config(settings, ONE_RANK)


def test_sizes_of_a_config_say_what_is_sent_only_together() -> None:
    def options(**own: Any) -> PipelineOptions:
        return PipelineOptions.from_config(config("1f1b", 2, 2) | own, ONE_RANK)

    def shape(**own: Any) -> tuple[int, ...] | None:
        return options(**own).tensor_shape

    assert shape(**SIZES) == (8, 8, 4)
    assert options(**SIZES).told_shape is None  # models may put the batch first
    assert options(**SIZES, TENSOR_SHAPE=(8, 8, 4)).told_shape == (8, 8, 4)
    assert shape(SEQ_LENGTH="variable") is None  # a word of the user's own
    assert shape(**SIZES | {"GLOBAL_BATCH_SIZE": 1}) is None


@pytest.mark.parametrize("shape", ["48", 5, (), (4, "8"), (4, -1), (4.0, 8)])
def test_a_tensor_shape_that_is_none(shape: Any) -> None:
    told = rf"tensor_shape must be a tuple of positive integers.*got {re.escape(repr(shape))}"
    with fake_world(rank=0, world_size=2), pytest.raises(ValueError, match=told):
        Pipeline(nn.Linear(1, 1), Mesh({"pp": 2}), tensor_shape=shape)


@pytest.mark.parametrize("schedule", [["1f1b"], 3, None, "2f2b"])
def test_a_schedule_that_is_none(schedule: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"there is no pipeline schedule {re.escape(repr(schedule))}; there"
    ):
        make_timetable(schedule, 2, 2)


def check_shared_on_the_wrong_rank(rank: int, world_size: int, port: int) -> str:
    """The head lies on the last rank, but the second one is said to have it."""
    launch(config("1f1b", 3, 2))
    wrapper = PipelineSharedModuleWrapper([0, 1])
    layer = nn.Linear(2, 2)
    message = ""
    if rank != 1:
        start = time.perf_counter()
        with pytest.raises(
            ValueError, match=r"registers Linear as shared by the pipeline ranks \[0, 1\]"
        ) as e:
            wrapper.register_module(layer)
        assert time.perf_counter() - start < SOON
        message = str(e.value)
    dist.barrier()  # nobody is gone, and nobody waits
    if rank != 2:  # and the mistake is that wrapper's alone
        PipelineSharedModuleWrapper([0, 1]).register_module(nn.Linear(2, 2))
    else:
        PipelineSharedModuleWrapper([0, 1])
    return message


def test_a_shared_module_on_the_wrong_rank() -> None:
    first, second, third = spawn(check_shared_on_the_wrong_rank, 3)
    assert first == third
    assert first.startswith("pipeline rank 2 registers")
    assert second == ""


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def check_too_few_layers(rank: int, world_size: int, port: int) -> None:
    launch(config("1f1b", 3, 2))
    layers = two_layers()
    assert isinstance(layers, nn.Sequential)
    message = "the model has 2 layers, but 3 pipeline stages with 1 chunk each need at least 3; use fewer"
    with pytest.raises(ValueError, match=message):
        build_pipeline_model(layers)
    with pytest.raises(ValueError, match=message):
        build_pipeline_model_from_cfg({"type": two_layers})
    dist.barrier()


def test_fewer_layers_than_stages() -> None:
    spawn(check_too_few_layers, 3)


def returns_scores(output: Tensor, label: Tensor) -> Tensor:
    return output


def check_no_loss(rank: int, world_size: int, port: int, criterion: Any) -> None:
    settings = config("1f1b", 2, 2)
    launch(settings)
    engine = _engine(settings, criterion=criterion)
    with pytest.raises(
        (TypeError, PipelineError), match="must return the loss as one tensor with one element"
    ) as e:
        engine.execute_schedule(iter([problem().batches[0]]))
    assert e.type is (PipelineError if rank == 0 else TypeError)


@pytest.mark.parametrize("criterion", [None, returns_scores])
def test_a_last_stage_without_loss(criterion: Any) -> None:
    spawn(check_no_loss, 2, criterion=criterion)


@pytest.mark.parametrize("earlier", [None, 3.0])
def test_a_failed_step_keeps_earlier_gradients_of_shared_weights(earlier: float | None) -> None:
    """They are the sum over the stages of the batches before, which accumulation goes on with."""
    shared, own = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    setattr(shared, SHARED_GROUP, None)
    for p in (shared, own):
        p.grad = None if earlier is None else torch.full((2,), earlier)

    def step() -> None:
        with synchronized_gradients([shared, own], rows=None):
            (shared.sum() * 5 + own.sum()).backward()
            raise RuntimeError("a stage fails")

    with pytest.raises(RuntimeError, match="a stage fails"):
        step()
    if earlier is None:
        assert shared.grad is None
    else:
        assert shared.grad is not None
        assert shared.grad.tolist() == [earlier, earlier]
