"""The Python text of a case.  The fuzzer runs this text, so what it prints for a failure is what failed.

The text has ``serial(log, snap, cuts)``, plain PyTorch, and ``plan_a`` and ``plan_b``, which every rank of a
plan runs.
"""

from __future__ import annotations

import textwrap

from colossalai.testing.fuzz.cases import ROWS, Case
from colossalai.testing.fuzz.habits import HABITS, Habit, lines_of
from colossalai.testing.fuzz.models import build_lines, sources
from colossalai.testing.fuzz.plans import PLUGINS, PlanSpec, at_folder

_IMPORTS = {
    "nullcontext": "from contextlib import nullcontext",
    "torch": "import torch",
    "Tensor": "from torch import Tensor, nn",
    "F": "from torch.nn import functional as F",
    "checkpoint(": "from torch.utils.checkpoint import checkpoint",
    "colossalai": "import colossalai",
    "colossalai.nn.optimizer": "import colossalai.nn.optimizer",
    "Booster": "from colossalai.booster import Booster",
    "FP16Torch": "from colossalai.booster.mixed_precision import FP16TorchMixedPrecision",
    "build_pipeline_model": "from colossalai.builder import build_pipeline_model",
    "gpc.": "from colossalai.core import global_context as gpc",
    "Policy(": "from colossalai.nn.policies import Cut, Head as ScoreHead, Policy, Table",
    "save_checkpoint": "from colossalai.utils import load_checkpoint, save_checkpoint",
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
        lambda name, model, _: snaps.update(
            {{name: {{k: v.clone() for k, v in model.state_dict().items()}}}}
        ),
        {cuts},
    )
    for function, ranks, first in [{runs}]:
        logs = spawn(run, ranks, function=function, folder=folder)
        print(function, "on", ranks, "ranks; what was logged, serially and on each rank:")
        for i, (name, step, value) in enumerate(entry for entry in serial_log if entry[1] >= first):
            if name != "weights":
                print(f"  {{name}} of step {{step}}: {{value}} | {{[log[i][2] for log in logs]}}")
        model = build(9)
        optimizer = make_optimizer(model)
{load}
        for name, value in model.state_dict().items():
            off = (value.double() - snaps["end"][name].double()).abs().max().item()
            print(f"  {{name}}: off by {{off:.3g}}")
"""

_RUN = """
def run(rank, world_size, port, function, folder):
    entries = []
    globals()[function](rank, world_size, port, folder, lambda *entry: entries.append(entry))
    return entries
"""

# a run that goes on from a checkpoint has no gradients; zeros would let an optimizer decay weights that are
# not used
_DROP = ["optimizer.zero_grad()"]


def script_text(case: Case) -> str:
    """A script that repeats a case and prints what the serial model and the plans did."""
    runs = ", ".join(f"({name!r}, {plan.ranks}, {first})" for name, plan, first in _runs(case))
    last = case.plans[-1]
    load = (
        'load_checkpoint(f"{folder}/{function}", model, optimizer)'
        if case.file
        else 'booster = Booster(device="cpu")\nmodel = booster.boost(model, optimizer).model\n'
        'booster.load(f"{folder}/{function}")'
    )
    first = case.save_at or 0 if case.b is not None else case.steps
    if case.model.by_parts:
        cuts = cuts_of(case, case.a)[:first] + cuts_of(case, last)[first:]
    else:
        cuts = [(1, 1)] * case.steps
    return (
        "\n\n\n".join(
            [
                case_text(case).strip("\n"),
                _RUN.strip("\n"),
                _MAIN.format(cuts=cuts, runs=runs, load=textwrap.indent(load, " " * 8)).strip("\n"),
            ]
        )
        + "\n"
    )


def cuts_of(case: Case, plan: PlanSpec) -> list[tuple[int, int]]:
    """For each step, over how many replicas a batch is spread, and in how many parts each of them takes
    it.
    """
    return [(plan.replicas, plan.micro if plan.pipeline > 1 else case.accumulate)] * case.steps


def _runs(case: Case) -> list[tuple[str, PlanSpec, int]]:
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
    elif any(plan.pipeline > 1 for plan in case.plans):
        body.append("params = [{'params': params}]  # a stage may have none")
    options = ", ".join(f"{k}={v!r}" for k, v in spec.options.items())
    return _function("make_optimizer(model)", [*body, f"return {spec.kind}(params, {options})"])


def _data(case: Case) -> str:
    model = case.model
    shape = f"{ROWS}, 3" if model.sequence else f"{ROWS}"
    rows = shape if model.sequence else f"{shape},"
    x = (
        f"torch.randint({model.inputs}, ({rows}), generator=g)"
        if model.tokens
        else f"torch.randn({shape}, {model.inputs}, generator=g)"
    )
    y = (
        f"torch.randn({shape}, {model.classes}, generator=g)"
        if case.squares
        else f"torch.randint({model.classes}, ({rows}), generator=g)"
    )
    loss = (
        "F.mse_loss(scores.float(), y)"
        if case.squares
        else "F.cross_entropy(scores.float().flatten(0, -2), y.flatten())"
    )
    return "\n\n\n".join(
        [
            _function("batch(step)", ["g = torch.Generator().manual_seed(1000 + step)", f"return {x}, {y}"]),
            _function("criterion(scores, y)", [f"return {loss}"]),
            _function("loss_of(model, data)", ["x, y = data", "return criterion(model(x), y)"]),
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
        body += [f"if step + 1 == {case.save_at}:", *_indent(['snap("mid", model, optimizer)', *_DROP])]
    return [
        "model = build(0)",
        "optimizer = make_optimizer(model)",
        *_scheduler(case),
        "model.train()",
        f"for step in range({case.steps}):",
        *_indent(body),
        'snap("end", model, optimizer)',
    ]


def _passes(case: Case, plan: PlanSpec) -> list[str]:
    """From a batch to gradients, and to the loss in ``value``."""
    n = case.accumulate
    if plan.pipeline > 1:
        call = (
            "engine.execute_schedule(iter([mine(batch(step))]), return_output_label=False)[2]"
            if plan.engine
            else "booster.execute_pipeline(iter([mine(batch(step))]), model, criterion, optimizer)['loss']"
        )
        return [f"loss = {call}", "value = None if loss is None else loss.item()"]
    backward = "engine.backward(loss)" if plan.engine else "booster.backward(loss, optimizer)"
    if n == 1:
        return ["loss = loss_of(model, mine(batch(step)))", backward, "value = loss.item()"]
    if plan.engine:  # the engine weighs the losses, and steps in the last of them
        return [
            "value = 0.0",
            f"for i, piece in enumerate(parts(mine(batch(step)), {n})):",
            "    loss = loss_of(model, piece)",
            "    engine.backward(loss)",
            f"    value += loss.item() / {n}",
            f"    if i < {n - 1}:",
            "        engine.step()",
            *(["        scheduler.step()"] if case.scheduler else []),
            "        engine.zero_grad()",
        ]
    return [
        "value = 0.0",
        f"for i, piece in enumerate(parts(mine(batch(step)), {n})):",
        f"    with booster.no_sync(model) if i < {n - 1} else nullcontext():",
        f"        loss = loss_of(model, piece) / {n}",
        "        booster.backward(loss, optimizer)",
        "    value += loss.item()",
    ]


def _save(case: Case, name: str) -> str:
    if not case.file:
        return f'booster.save(f"{{folder}}/{name}")'
    scheduler = ", scheduler" if case.scheduler else ""
    return f'save_checkpoint(f"{{folder}}/{name}", 0, model, optimizer{scheduler})'


def _load(case: Case, name: str) -> str:
    if not case.file:
        return f'booster.load(f"{{folder}}/{name}")'
    scheduler = ", scheduler" if case.scheduler else ""
    return f'load_checkpoint(f"{{folder}}/{name}", model, optimizer{scheduler})'


def _built(case: Case, plan: PlanSpec, seed: int) -> list[str]:
    """The model of a rank, before it is boosted."""
    lines = [f"model = build({seed})"]
    if plan.tensor > 1:
        rules = ", ".join(f"{path!r}: {rule}" for path, rule in case.model.rules().items())
        lines.append(f"model = colossalai.nn.parallelize(model, policy=Policy(('fuzz',), {{{rules}}}))")
    if plan.pipeline > 1:
        lines.append(f"model = build_pipeline_model(model, {plan.chunks})")
    return lines


def _boosted(case: Case, plan: PlanSpec, name: str, first: int) -> list[str]:
    clip = next((h.value for h in case.habits if h.name == "clip quietly"), None) if plan.engine else None
    body = [
        *lines_of(case.habits, "before", serial=False),
        *_passes(case, plan),
        'log("loss", step, value)',
        *([] if plan.engine else lines_of(case.habits, "clip", serial=False)),
        "engine.step()" if plan.engine else "optimizer.step()",
        *(["scheduler.step()"] if case.scheduler else []),
        *(
            lines_of(case.habits, "zero", serial=False)
            or ["engine.zero_grad()" if plan.engine else "optimizer.zero_grad()"]
        ),
        *lines_of(case.habits, "after", serial=False),
    ]
    if case.save_at is not None and first == 0:
        body += [f"if step + 1 == {case.save_at}:", *_indent([_save(case, "mid"), *_DROP])]
    config = plan.config(case.accumulate, clip)
    lines = [
        f"colossalai.launch({config!r}, rank, world_size, '127.0.0.1', port, backend='gloo', verbose=False)"
    ]
    if plan.plugin != "none" and not plan.engine:
        lines.append(f"from colossalai.booster.plugin import {PLUGINS[plan.plugin]}")
    if not plan.engine:
        lines.append(f"booster = {plan.booster_call()}")
    lines += [
        *_built(case, plan, 0 if first == 0 else 5),
        "optimizer = make_optimizer(model)",
        *_scheduler(case),
    ]
    scheduler = ", lr_scheduler=scheduler" if case.scheduler else ""
    lines += (
        [
            f"engine, _, _, scheduler = colossalai.initialize(model, optimizer, criterion{scheduler},"
            " verbose=False)",
            "model, optimizer = engine.model, engine.optimizer",
            "engine.train()",
        ]
        if plan.engine
        else [
            f"model, optimizer, _, _, scheduler = booster.boost(model, optimizer{scheduler})",
            "model.train()",
        ]
    )
    replica = "gpc.mesh.coord['dp']" if plan.tensor * plan.pipeline > 1 else "rank"
    lines += ["", "def mine(data):", f"    return parts(data, {plan.replicas})[{replica}]", ""]
    if first:
        lines += _again(case.habits, first)
        lines.append(_load(case, "mid"))
    text = [*lines, f"for step in range({first}, {case.steps}):", *_indent(body), _save(case, name)]
    return [at_folder(line) for line in text]


def _again(habits: list[Habit], first: int) -> list[str]:
    """What a run that begins at step ``first`` must do because of earlier steps."""
    found: list[str] = []
    for habit in habits:
        if HABITS[habit.name].lasting and habit.at is not None and habit.at < first:
            found += HABITS[habit.name].boosted.split("\n")
    return found
