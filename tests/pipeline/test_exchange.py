"""What may travel between stages, and how much of it is stored and sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import colossalai.pipeline.p2p as p2p
from colossalai.engine import Engine
from colossalai.engine.schedule import PipelineSchedule
from colossalai.mesh import Mesh
from colossalai.pipeline.chunks import with_chunks
from colossalai.pipeline.pipeline import Pipeline
from colossalai.pipeline.schedule import make_timetable
from colossalai.pipeline.wire import check_nest
from colossalai.testing import spawn
from tests.engine.plans import logged
from tests.pipeline.plans import HIDDEN, config, launch, problem
from tests.pipeline.test_engine import SCHEDULES, _engine


class First(nn.Module):
    """Sends a nest: tensors of many dtypes, one of them empty, one used twice, one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, length: Tensor) -> dict[str, Any]:
        x = x[:, : int(length.max())]  # another shape in every micro-batch
        hidden = self.layer(x)
        mask = torch.arange(x.shape[1]) < length[:, None]
        return {
            "pair": (hidden, [mask, self.unused(x)]),
            "again": hidden,
            "half": hidden.to(torch.bfloat16),
            "empty": torch.empty(0, 3),
            "phase": torch.polar(torch.ones(2), torch.ones(2)),
        }


class Second(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, pair: Any, again: Tensor, half: Tensor, empty: Tensor, phase: Tensor) -> Tensor:
        hidden, (mask, _) = pair
        assert mask.dtype is torch.bool
        assert not mask.requires_grad
        assert empty.shape == (0, 3)
        assert phase.dtype is torch.complex64
        return self.layer((hidden + again + half.relu_().float()) * mask[..., None]).mean((1, 2))


def _stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [First(), Second()]


class _Trains:
    def expect_gradients(self) -> None: ...

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss


def check_nests(rank: int, world_size: int, port: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"tcp://127.0.0.1:{port}")
    mesh = Mesh({"pp": 2})
    x, length = torch.randn(4, 6, 4, generator=torch.Generator().manual_seed(3)), torch.tensor([3, 5, 2, 2])
    serial = _stages()
    parts = [serial[1](**serial[0](x[i : i + 1], length[i : i + 1])) for i in range(4)]
    torch.cat(parts).mean().backward()
    for schedule in ("gpipe", "1f1b", "zbh1"):
        own = _stages()[rank]
        pipeline = Pipeline(own, mesh, schedule=schedule, microbatches=4)
        output, loss = pipeline.step((x, length), None, lambda output: output.mean(), _Trains())
        if rank == 1:
            torch.testing.assert_close(output, torch.cat(parts).detach())
            torch.testing.assert_close(loss, torch.cat(parts).mean().detach())
        for mine, theirs in zip(own.parameters(), serial[rank].parameters(), strict=True):
            if theirs.grad is None:  # nobody used it, here neither
                assert mine.grad is None
            else:
                torch.testing.assert_close(mine.grad, theirs.grad)


def test_nests_whose_shapes_change() -> None:
    spawn(check_nests, 2)


class Optional(nn.Module):
    """Returns a mask, or none, beside the hidden states, as blocks of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        hidden = self.layer(hidden)
        if mask is not None:
            hidden = hidden * mask
        # a mask for every other micro-batch of the first stage, so both kinds of messages follow each other
        return hidden, (hidden > 0 if mask is None and hidden.sum() > 0 else None)


def check_none(rank: int, world_size: int, port: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"tcp://127.0.0.1:{port}")
    mesh = Mesh({"pp": 2})
    x = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(3))
    for schedule, chunks in SCHEDULES.items():
        torch.manual_seed(0)
        serial = [Optional() for _ in range(2 * chunks)]
        masks, losses = set(), []
        for part in x.chunk(4):
            nest: Any = (part, None)
            for stage in serial:
                nest = stage(*nest)
                masks.add(nest[1] is None)
            losses.append(nest[0].square().mean())
        assert masks == {True, False}
        expected = sum(losses) / 4
        torch.autograd.backward(expected)
        torch.manual_seed(0)
        same = [Optional() for _ in range(2 * chunks)]
        placement = make_timetable(schedule, 2, 4, chunks).placement
        own = [placement.stage(rank, chunk) for chunk in range(chunks)]
        model = same[own[0]] if chunks == 1 else with_chunks(nn.ModuleList(same[i] for i in own))
        pipeline = Pipeline(model, mesh, schedule=schedule, microbatches=4)
        _, loss = pipeline.step((x, None), None, lambda hidden, mask: hidden.square().mean(), _Trains())
        if pipeline.has_loss:
            torch.testing.assert_close(loss, expected.detach())
        for i in own:
            torch.testing.assert_close(same[i].layer.weight.grad, serial[i].layer.weight.grad)


def test_none_beside_the_tensors() -> None:
    spawn(check_none, 2)


@pytest.mark.parametrize(
    ("nest", "told"),
    [
        ((None, [None]), "a tuple of 2 without a tensor"),
        ({}, "a dict of nothing without a tensor"),
        ((torch.ones(1), 2), r"int at \[1\]; all stages but"),
        (None, "NoneType; all stages but"),
    ],
)
def test_nests_that_cannot_be_sent(nest: Any, told: str) -> None:
    with pytest.raises(TypeError, match=f"stage 1 returned {told}"):
        check_nest(nest, "stage 1")


class Same(nn.Module):
    """Every stage calls its input ``x``, as the batch does; the second input is the batch's in all of
    them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.layer(x) * scale


def check_same_names(rank: int, world_size: int, port: int) -> None:
    launch(config("1f1b", 2, 2))
    torch.manual_seed(0)
    stages = [Same(), Same()]
    x, scale = torch.randn(4, HIDDEN), torch.rand(4, 1)
    expected = stages[1](stages[0](x, scale), scale).detach()
    optimizer = torch.optim.SGD(stages[rank].parameters(), lr=0.1)
    engine = Engine(stages[rank], optimizer, lambda output: output.mean(), schedule=PipelineSchedule(2))
    output, _, _ = engine.execute_schedule(iter([{"x": x, "scale": scale}]))
    if rank == 1:
        torch.testing.assert_close(output, expected)


def test_what_a_stage_receives_goes_before_the_batch() -> None:
    spawn(check_same_names, 2)


def check_descriptions(rank: int, world_size: int, port: int) -> None:
    """Shapes are sent once, or not at all if they are known; a wrong tensor_shape costs a warning, not the
    result.
    """
    launch(config("1f1b", 2, 4))
    sent: list[bytes] = []
    original = p2p.Link._post_text

    def post(self: Any, text: bytes, target: int, sign: int) -> Any:
        sent.append(text)
        return original(self, text, target, sign)

    p2p.Link._post_text = post  # type: ignore[method-assign]
    batch = problem().batches[0]
    for shape, texts, warnings in ((None, 1, 0), ((4, HIDDEN), 0, 0), ((9, 9), 1, 1)):
        sent.clear()
        with logged() as messages:
            engine = _engine(config("1f1b", 2, 4, TENSOR_SHAPE=shape))
            for _ in range(2):
                engine.execute_schedule(iter([batch]))
        assert len(sent) == texts
        told = [text for text in messages if "tensor_shape says" in text]
        assert len(told) == (warnings if rank == 0 else 0)
    if rank == 0:
        assert "stages exchange (9, 9) in torch.float32, but stage 0 sends (4, 8)" in told[0]


def test_shapes_are_sent_when_they_change() -> None:
    spawn(check_descriptions, 2)


def check_scatter(rank: int, world_size: int, port: int) -> None:
    settings = config("1f1b", 2, 2)
    settings["parallel"]["tensor"] = {"mode": "1d", "size": 2}
    launch(settings)
    torch.manual_seed(0)
    stage = nn.Linear(3, 3)
    moved = []
    for scatter in (False, True):
        model = nn.Linear(3, 3)
        model.load_state_dict(stage.state_dict())
        schedule = PipelineSchedule(2, scatter_gather_tensors=scatter)
        engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), schedule=schedule)
        sizes: list[int] = []
        link = schedule.pipeline._link
        post = link._post
        link._post = lambda tensor, target, post=post, sizes=sizes: (  # type: ignore[method-assign]
            sizes.append(tensor.numel()),
            post(tensor, target),
        )[1]
        x = torch.arange(12.0).view(4, 3) / 12
        engine.execute_schedule(iter([(x, x)]))
        grads = [p.grad.clone() for p in model.parameters()]
        moved.append((grads, max(sizes[2:])))
    for whole, gathered in zip(moved[0][0], moved[1][0], strict=True):
        assert torch.equal(whole, gathered)
    assert moved[0][1] == 2 * moved[1][1] == 24  # bytes of a micro-batch


def test_scatter_gather_tensors() -> None:
    spawn(check_scatter, 4)


def check_scatter_refused(rank: int, world_size: int, port: int) -> None:
    launch(config("1f1b", 1, 1))
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="which tensor mode '1d' has; the mode is None"):
        Engine(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            schedule=PipelineSchedule(1, scatter_gather_tensors=True),
        )


def test_scatter_gather_needs_equal_activations() -> None:
    spawn(check_scatter_refused, 1)
