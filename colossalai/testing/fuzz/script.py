"""The Python text of a case.  The fuzzer runs this text, so what it prints for a failure is what failed.

The text has ``serial(log, snap, cuts)``, plain PyTorch, and ``plan_a`` and ``plan_b``, which every rank of a plan runs.
"""

from __future__ import annotations

import textwrap

from colossalai.testing.fuzz.cases import ROWS, Case
from colossalai.testing.fuzz.habits import HABITS, Habit, lines_of
from colossalai.testing.fuzz.models import build_lines, sources
from colossalai.testing.fuzz.plans import PLUGINS, Plan

_IMPORTS = {
    "nullcontext": "from contextlib import nullcontext",
    "torch": "import torch",
    "Tensor": "from torch import Tensor, nn",
    "F": "from torch.nn import functional as F",
    "checkpoint(": "from torch.utils.checkpoint import checkpoint",
    "colossalai": "import colossalai",
    "colossalai.nn.optimizer": "import colossalai.nn.optimizer",
    "Booster": "from colossalai.booster import Booster",
}
# each helper is printed if its name is used
_HELPERS = {
    "evaluation": """
def evaluation():
    return batch(999)
""",
    "freeze": """
def freeze(model):
    inner = model.unwrap() if hasattr(model, "unwrap") else model
    inner{layers}[0].requires_grad_(False)
""",
    "parts": """
def parts(data, n):
    return list(zip(*(t.chunk(n) for t in data), strict=True))
""",
    "weights": """
def weights(model):
    values = {{}}
    for name, value in model.state_dict().items():
        values[name] = (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
    return values
""",
}


def case_text(case: Case) -> str:
    """The functions of a case."""
    pieces = [sources(case.model), _function("build(seed)", build_lines(case.model))]
    pieces += [_optimizer(case), _data(case)]
    runs = [_function("serial(log, snap, cuts)", _serial(case))]
    for name, plan, first in _runs(case):
        signature = f"{name}(rank, world_size, port, folder, log)"
        runs.append(_function(signature, _boosted(case, plan, name, first)))
    layers = ".layers" if case.model.root == "Net" else ""
    helpers = [
        text.format(layers=layers)
        for name, text in _HELPERS.items()
        if any(f"{name}(" in run for run in runs)
    ]
    pieces += [*helpers, *runs]
    body = "\n\n\n".join(piece.strip("\n") for piece in pieces)
    imports = [line for name, line in _IMPORTS.items() if name in body]
    return "\n".join(imports) + "\n\n\n" + body + "\n"


_MAIN = """
if __name__ == "__main__":
    import tempfile

    from colossalai.testing import spawn

    folder = tempfile.mkdtemp()
    serial_log, snaps = [], {{}}
    serial(
        lambda *entry: serial_log.append(entry),
        lambda name, model, _: snaps.update({{name: {{k: v.clone() for k, v in model.state_dict().items()}}}}),
        {cuts},
    )
    for function, ranks, first in [{runs}]:
        logs = spawn(run, ranks, function=function, folder=folder)
        print(function, "on", ranks, "ranks; what was logged, serially and on each rank:")
        for i, (name, step, value) in enumerate(entry for entry in serial_log if entry[1] >= first):
            if name != "weights":
                print(f"  {{name}} of step {{step}}: {{value}} | {{[log[i][2] for log in logs]}}")
        booster = Booster(device="cpu")
        model = build(9)
        model = booster.boost(model, make_optimizer(model)).model
        booster.load(f"{{folder}}/{{function}}")
        for name, value in model.state_dict().items():
            print(f"  {{name}}: off by {{(value.double() - snaps['end'][name].double()).abs().max().item():.3g}}")
"""

_RUN = """
def run(rank, world_size, port, function, folder):
    entries = []
    globals()[function](rank, world_size, port, folder, lambda *entry: entries.append(entry))
    return entries
"""


def script_text(case: Case) -> str:
    """A script that repeats a case and prints what the serial model and the plans did."""
    runs = ", ".join(f"({name!r}, {plan.ranks}, {first})" for name, plan, first in _runs(case))
    last = case.plans[-1]
    first = case.save_at or 0 if case.b is not None else case.steps
    if case.model.by_parts:
        cuts = [(case.a.replicas, case.accumulate)] * first + [(last.replicas, case.accumulate)] * (
            case.steps - first
        )
    else:
        cuts = [(1, 1)] * case.steps
    return (
        "\n\n\n".join(
            [case_text(case).strip("\n"), _RUN.strip("\n"), _MAIN.format(cuts=cuts, runs=runs).strip("\n")]
        )
        + "\n"
    )


def _runs(case: Case) -> list[tuple[str, Plan, int]]:
    runs = [("plan_a", case.a, 0)]
    if case.b is not None:
        runs.append(("plan_b", case.b, case.save_at or 0))
    return runs


def _function(signature: str, body: list[str]) -> str:
    return f"def {signature}:\n{textwrap.indent(chr(10).join(body), '    ')}"


def _optimizer(case: Case) -> str:
    spec = case.optimizer
    some = " if p.requires_grad" if spec.trainable_only else ""
    body = [f"params = [p for p in model.parameters(){some}]"]
    if spec.groups:
        body += [
            "matrices = [p for p in params if p.ndim > 1]",
            "others = [p for p in params if p.ndim <= 1]",
            f"params = [{{'params': matrices}}, {{'params': others, 'lr': {spec.options['lr'] * 0.5!r}}}]",
        ]
    options = ", ".join(f"{k}={v!r}" for k, v in spec.options.items())
    return _function("make_optimizer(model)", [*body, f"return {spec.kind}(params, {options})"])


def _data(case: Case) -> str:
    model = case.model
    shape = f"{ROWS}, 3" if model.sequence else f"{ROWS}"
    wide = model.dtype != "float32"
    x = (
        f"torch.randint({model.inputs}, ({shape}{'' if model.sequence else ','}), generator=g)"
        if model.tokens
        else f"torch.randn({shape}, {model.inputs}, generator=g)"
        + (f".to(torch.{model.dtype})" if wide else "")
    )
    y = (
        f"torch.randn({shape}, {model.classes}, generator=g)"
        if case.squares
        else f"torch.randint({model.classes}, ({shape}{'' if model.sequence else ','}), generator=g)"
    )
    score = "model(x)" if wide else "model(x).float()"
    loss = (
        f"F.mse_loss({score}, y{'.double()' if wide else ''})"
        if case.squares
        else f"F.cross_entropy({score}.flatten(0, -2), y.flatten())"
    )
    return "\n\n".join(
        [
            _function("batch(step)", ["g = torch.Generator().manual_seed(1000 + step)", f"return {x}, {y}"]),
            _function("loss_of(model, data)", ["x, y = data", f"return {loss}"]),
        ]
    )


def _scheduler(case: Case) -> list[str]:
    if not case.scheduler:
        return []
    return ["scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)"]


def _indent(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _serial(case: Case) -> list[str]:
    keeps = case.model.has("Batch")  # the buffers of the first replica stay
    inner = ["loss = loss_of(model, piece) / (replicas * pieces)", "loss.backward()", "value += loss.item()"]
    passes = ["for r, own in enumerate(parts(batch(step), replicas)):"]
    if keeps:
        passes += _indent(
            ["if r > 0:", "    kept = [b.clone() for b in model.buffers()] if r == 1 else kept"]
        )
    passes += _indent(["for piece in parts(own, pieces):", *_indent(inner)])
    if keeps:
        passes += [
            "if replicas > 1:",
            "    for b, old in zip(model.buffers(), kept, strict=True):",
            "        b.copy_(old)",
        ]
    body = [
        *lines_of(case.habits, "before", serial=True),
        "replicas, pieces = cuts[step]",
        "value = 0.0",
        *passes,
        'log("loss", step, value)',
        *lines_of(case.habits, "clip", serial=True),
        "optimizer.step()",
        *(["scheduler.step()"] if case.scheduler else []),
        *(lines_of(case.habits, "zero", serial=True) or ["optimizer.zero_grad()"]),
        *lines_of(case.habits, "after", serial=True),
    ]
    if case.save_at is not None:
        body += [f"if step + 1 == {case.save_at}:", '    snap("mid", model, optimizer)']
    return [
        "model = build(0)",
        "optimizer = make_optimizer(model)",
        *_scheduler(case),
        "model.train()",
        f"for step in range({case.steps}):",
        *_indent(body),
        'snap("end", model, optimizer)',
    ]


def _passes(case: Case) -> list[str]:
    if case.accumulate == 1:
        return [
            "loss = loss_of(model, mine(batch(step)))",
            "booster.backward(loss, optimizer)",
            "value = loss.item()",
        ]
    n = case.accumulate
    return [
        "value = 0.0",
        f"for i, piece in enumerate(parts(mine(batch(step)), {n})):",
        f"    with booster.no_sync(model) if i < {n - 1} else nullcontext():",
        f"        loss = loss_of(model, piece) / {n}",
        "        booster.backward(loss, optimizer)",
        "    value += loss.item()",
    ]


def _boosted(case: Case, plan: Plan, name: str, first: int) -> list[str]:
    body = [
        *lines_of(case.habits, "before", serial=False),
        *_passes(case),
        'log("loss", step, value)',
        *lines_of(case.habits, "clip", serial=False),
        "optimizer.step()",
        *(["scheduler.step()"] if case.scheduler else []),
        *(lines_of(case.habits, "zero", serial=False) or ["optimizer.zero_grad()"]),
        *lines_of(case.habits, "after", serial=False),
    ]
    if case.save_at is not None and first == 0:
        body += [f"if step + 1 == {case.save_at}:", '    booster.save(f"{folder}/mid")']
    lines = [
        "colossalai.launch({}, rank, world_size, '127.0.0.1', port, backend='gloo', verbose=False)",
    ]
    if plan.plugin != "none":
        lines.append(f"from colossalai.booster.plugin import {PLUGINS[plan.plugin]}")
    lines += [
        f"booster = {plan.booster_call()}",
        f"model = build({0 if first == 0 else 5})",
        "optimizer = make_optimizer(model)",
        *_scheduler(case),
        "model, optimizer, _, _, scheduler = booster.boost("
        f"model, optimizer{', lr_scheduler=scheduler' if case.scheduler else ''})",
        "",
        "def mine(data):",
        "    return parts(data, world_size)[rank]",
        "",
        "model.train()",
    ]
    if first:
        lines += _again(case.habits, first)
        lines.append('booster.load(f"{folder}/mid")')
    return [
        *lines,
        f"for step in range({first}, {case.steps}):",
        *_indent(body),
        f'booster.save(f"{{folder}}/{name}")',
    ]


def _again(habits: list[Habit], first: int) -> list[str]:
    """What a run that begins at step ``first`` must do because of earlier steps."""
    found: list[str] = []
    for habit in habits:
        if HABITS[habit.name].lasting and habit.at is not None and habit.at < first:
            found += HABITS[habit.name].boosted.split("\n")
    return found
