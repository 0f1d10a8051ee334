"""Pictures of runs: of a dry run, a timeline, timetables, and the steps of a ring."""

from __future__ import annotations

from pathlib import Path

import torch

import colossalai
from colossalai.dry_run import Parts, dry_run
from colossalai.pipeline.schedule import PassKind, make_timetable, price
from colossalai.testing import spawn
from docs.figures.svg import COLOURS, LIGHT, Picture
from titans.model.gpt import GPTLMLoss, gpt2_xl

_INK = "#5f6368"


def _gpt() -> Parts:
    model = gpt2_xl()
    ids = torch.zeros(1, 128, dtype=torch.long)
    return Parts(model, torch.optim.Adam(model.parameters()), GPTLMLoss(), (ids, ids))


def zero(folder: Path) -> None:
    """What a rank of four keeps of GPT-2 XL, as a dry run counts it."""
    rows = (
        ("no ZeRO", {"fp16": {"mode": "naive"}}),
        ("ZeRO-1", {"zero": {"level": 1}}),
        ("ZeRO-2", {"zero": {"level": 2}}),
        ("ZeRO-3 (Gemini)", {"zero": {"level": 3, "placement_policy": "cuda"}}),
    )
    kinds = ("weights", "gradients", "masters", "states")
    picture = Picture(720, 250, "Memory of a rank of four under the stages of ZeRO")
    picture.words(
        20, 28, "GPT-2 XL (1.56 B), fp16 with Adam, 4 data-parallel ranks: GiB on each GPU", bold=True
    )
    for column, kind in enumerate(kinds):
        picture.box(20 + column * 130, 40, 14, 14, COLOURS[column])
        words = {"weights": "fp16 weights", "masters": "fp32 weights", "states": "Adam's moments"}.get(
            kind, kind
        )
        picture.words(40 + column * 130, 52, words, size=11)
    for row, (name, config) in enumerate(rows):
        memory = dry_run(config, 4, _gpt)[0].memory
        y, x = 72 + row * 42, 140.0
        picture.words(20, y + 20, name, size=12)
        total = 0.0
        for column, kind in enumerate(kinds):
            gib = getattr(memory, kind) / 2**30
            total += gib
            width = gib * 19
            if width:
                picture.box(x, y, width, 30, COLOURS[column], f"{gib:.1f}" if width > 26 else "", size=10)
            x += width
        picture.words(x + 8, y + 20, f"{total:.1f}", size=12)
    picture.save(folder, "zero")


def _gemini_step(rank: int, world_size: int, port: int) -> list[tuple[float, str, int, str]]:
    from colossalai.booster import Booster
    from colossalai.booster.plugin import GeminiPlugin
    from colossalai.nn.optimizer import HybridAdam

    colossalai.launch_from_torch({}, backend="gloo", verbose=False)
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(512, 512), torch.nn.GELU())]
    plugin = GeminiPlugin(
        device="cpu",
        precision="fp32",
        placement_policy="cpu",
        min_chunk_size_mb=1,
        search_range_mb=1,
        hidden_dim=512,
        update_in_backward=True,
    )
    booster = Booster(plugin=plugin)
    model = torch.nn.Sequential(*layers)
    model, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters(), lr=1e-3))
    for _ in range(4):
        booster.backward(model(torch.randn(256, 512)).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    timeline = model.gemini_manager.timeline
    timeline.begin()
    return [(event.when, event.kind, event.chunk, event.home) for event in timeline.last]


def gemini(folder: Path) -> None:
    """Where each chunk is in one step under Gemini, from the timeline of a run."""
    events = spawn(_gemini_step, 2)[0]
    chunks = sorted({chunk for _, _, chunk, _ in events})
    end = max(when for when, *_ in events) * 1.02
    width = 600
    picture = Picture(760, 110 + 30 * len(chunks), "Chunks of weights in one step under Gemini")
    picture.words(
        20, 28, "One step under Gemini, placement policy cpu: a row is a chunk of weights", bold=True
    )
    for column, (colour, words) in enumerate(
        (
            (LIGHT, "rests on the host"),
            (COLOURS[0], "gathered on the device"),
            (COLOURS[1], "updated on the host"),
        )
    ):
        picture.box(20 + column * 190, 40, 14, 14, colour)
        picture.words(40 + column * 190, 52, words, size=11)
    for row, chunk in enumerate(chunks):
        y = 70 + row * 30
        picture.words(20, y + 16, f"chunk {chunk}", size=11)
        picture.box(120, y, width, 22, LIGHT)
        for start_kind, end_kind, colour in (
            ("fetch", "drop", COLOURS[0]),
            ("update", "updated", COLOURS[1]),
        ):
            start: float | None = None
            for when, kind, which, _ in events:
                if which == chunk and kind == start_kind:
                    start = when
                elif which == chunk and kind == end_kind and start is not None:
                    left, right = 120 + width * start / end, 120 + width * when / end
                    picture.box(left, y, max(right - left, 2), 22, colour)
                    start = None
    picture.line([(120, 78 + 30 * len(chunks)), (120 + width, 78 + 30 * len(chunks))], arrow=True)
    picture.words(
        120, 98 + 30 * len(chunks), "forward pass, then backward pass, in which chunks are updated", size=11
    )
    picture.save(folder, "gemini")


_PASSES = {
    PassKind.FORWARD: (COLOURS[0], "F"),
    PassKind.BACKWARD: (COLOURS[1], "B"),
    PassKind.INPUT_GRAD: (COLOURS[1], "B"),
    PassKind.WEIGHT_GRAD: (COLOURS[2], "W"),
}


def pipelines(folder: Path) -> None:
    """The timetables of all schedules for four ranks and eight micro-batches."""
    schedules = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zbh1", 1), ("zbv", 2))
    ranks, microbatches = 4, 8
    longest = price(make_timetable("gpipe", ranks, microbatches)).makespan
    picture = Picture(760, 70 + len(schedules) * 122, "Pipeline schedules and their bubbles")
    picture.words(
        20, 28, "4 stages, 8 micro-batches; a backward pass takes twice as long as a forward pass", bold=True
    )
    for column, words in enumerate(("forward", "backward (in zb*: of inputs only)", "gradients of weights")):
        picture.box(20 + column * 210, 40, 14, 14, COLOURS[column])
        picture.words(40 + column * 210, 52, words, size=11)
    for number, (name, chunks) in enumerate(schedules):
        table = make_timetable(name, ranks, microbatches, chunks)
        times = price(table)
        scale = 610 / longest / chunks  # a chunk has its part of the layers
        top = 72 + number * 122
        picture.words(20, top + 10, name, bold=True, size=12)
        picture.words(20, top + 28, f"bubble {times.bubble:.0%}", size=11, ink=_INK)
        for rank, row in enumerate(times.spans):
            y = top + rank * 24
            picture.box(120, y, times.makespan * scale, 22, LIGHT)
            for action, start, end in row:
                colour, _ = _PASSES[action.kind]
                wide = (end - start) * scale
                words = str(action.microbatch) if wide > 9 else ""
                picture.box(120 + (start - times.start) * scale, y, wide, 22, colour, words, size=9)
    picture.save(folder, "pipelines")


def ring(folder: Path) -> None:
    """The steps of a ring of four ranks, one after the other; beside it Ulysses."""
    ranks = 4
    picture = Picture(760, 330, "Ring attention step by step, and Ulysses")
    picture.words(20, 28, "Ring: keys and values travel", bold=True)
    picture.words(410, 28, "Ulysses: tokens against heads", bold=True)
    for step in range(ranks):
        picture.words(20, 48, f"step {step + 1} of {ranks}", size=11, ink=_INK, step=step)
    for rank in range(ranks):
        y = 66 + rank * 50
        picture.words(20, y + 24, f"rank {rank}", size=11)
        picture.box(75, y, 70, 38, COLOURS[rank], f"queries {rank}", size=10)
        for key in range(ranks):
            picture.box(165 + key * 48, y, 44, 38, LIGHT)
        for step in range(ranks):
            key = (rank - step) % ranks  # what it was handed in this step
            picture.box(165 + key * 48, y, 44, 38, COLOURS[key], f"k,v {key}", size=10, step=step)
    for rank in range(ranks):
        y = 66 + rank * 50
        picture.box(410, y, 120, 38, COLOURS[rank], f"tokens of rank {rank}", size=10)
        picture.box(600 + rank * 34, 66, 30, 188, COLOURS[rank], str(rank), size=10)
    picture.line([(536, 140), (592, 140)], arrow=True)
    picture.line([(592, 180), (536, 180)], arrow=True)
    picture.words(564, 130, "q, k, v", size=10, at="middle")
    picture.words(564, 198, "output", size=10, at="middle")
    picture.words(600, 60, "all tokens, some heads", size=10)
    picture.words(20, 290, "Each rank attends to the keys it holds, then hands them on:", size=11)
    picture.words(20, 306, "n - 1 messages, at the same time as the products.", size=11)
    picture.words(410, 290, "One all-to-all before attention, one after it:", size=11)
    picture.words(410, 306, "the number of heads must divide.", size=11)
    picture.save(folder, "ring", steps=ranks)


def experts(folder: Path) -> None:
    """Where a router sends the tokens of two ranks."""
    from colossalai.nn.layer.moe import Top1Router

    torch.manual_seed(4)
    router = Top1Router(drop_tks=False)
    chosen = router(torch.randn(12, 4)).chosen
    places = chosen.flatten().tolist()
    picture = Picture(700, 330, "Tokens of two ranks travel to the ranks of their experts")
    picture.words(
        20, 28, "A mixture of 4 experts over 2 ranks: tokens travel to their expert and back", bold=True
    )
    used = [0] * 4
    for token, expert in enumerate(places):
        rank = token // 6
        y = 56 + token * 21 + rank * 6
        slot = used[expert]
        used[expert] += 1
        target = 58 + expert * 64 + (expert // 2) * 6 + slot * 9
        picture.line([(184, y + 8), (440, target + 4)], ink=COLOURS[expert])
        picture.box(110, y, 70, 17, COLOURS[expert], f"token {token}", size=9)
    for rank in range(2):
        picture.words(20, 120 + rank * 132, f"rank {rank}", size=12)
        picture.words(610, 120 + rank * 132, f"rank {rank}", size=12)
    for expert in range(4):
        y = 56 + expert * 64 + (expert // 2) * 6
        picture.box(
            444,
            y,
            150,
            56,
            COLOURS[expert],
            f"expert {expert}: {used[expert]} token{'s' * (used[expert] != 1)}",
            size=11,
        )
    picture.save(folder, "experts")


def all_runs(folder: Path) -> None:
    zero(folder)
    gemini(folder)
    pipelines(folder)
    ring(folder)
    experts(folder)
