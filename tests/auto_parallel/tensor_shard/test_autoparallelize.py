"""``autoparallelize`` from the call to a model that trains as the serial one, and what it refuses."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import colossalai
from colossalai.auto_parallel.tensor_shard.cluster import extract_alpha_beta_for_device_mesh
from colossalai.auto_parallel.tensor_shard.initialize import (
    ModuleWrapper,
    autoparallelize,
    build_strategy_constructor,
    extract_meta_args_from_dataloader,
    initialize_device_mesh,
    initialize_model,
    solve_solution,
)
from colossalai.auto_parallel.tensor_shard.solution import load_solution
from colossalai.auto_parallel.tensor_shard.solver import GraphAnalyser, InfeasibleBudgetError
from colossalai.auto_parallel.tensor_shard.strategies.chosen import predicted_step
from colossalai.context.fake_launch import fake_world
from colossalai.device.presets import DEVICES, DevicePreset
from colossalai.fx import trace_model
from colossalai.mesh import serial_tensor
from colossalai.mesh.parameter import model_mesh
from colossalai.testing import spawn
from tests.auto_parallel.tensor_shard.planning import Mlp, constructor, grid

COSTS = {(i, j): (1e-6, 1e-9 if i // 2 == j // 2 else 1e-8) for i in range(4) for j in range(4) if i != j}


def _start(rank: int, world_size: int, port: int) -> nn.Module:
    colossalai.launch({}, rank, world_size, "localhost", port, backend="gloo", verbose=False)
    torch.manual_seed(0)
    return Mlp()


def _steps(model: nn.Module, batches: list[torch.Tensor]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x in batches:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _trains_as_serial(rank: int, world_size: int, port: int, file: str) -> None:
    model = _start(rank, world_size, port)
    serial, again = copy.deepcopy(model), copy.deepcopy(model)
    batches = list(torch.randn(3, 8, 16))
    options: dict[str, Any] = {
        "alpha_beta_dict": COSTS,
        "shard_option": "full_shard",
        "solver_solution_path": file,
    }
    made, solution = autoparallelize(
        model,
        {"x": torch.empty(8, 16, device="meta")},
        save_solver_solution=True,
        return_solution=True,
        **options,
    )
    assert solution.sharded.axes == {"0": 2, "1": 2}  # rows have the fast links
    assert [line.split()[0] for line in solution] == ["up", "gelu", "norm", "down"]
    expected = _steps(serial, batches)
    assert _steps(made, batches) == pytest.approx(expected, rel=1e-4)
    mesh = model_mesh(made)
    assert mesh is not None
    for name, parameter in made.named_parameters():
        whole = serial_tensor(parameter, parameter, mesh)
        torch.testing.assert_close(whole, serial.get_parameter(name).detach(), rtol=1e-4, atol=1e-5)
    loaded = autoparallelize(again, torch.empty(8, 16), load_solver_solution=True, **options)
    assert _steps(loaded, batches) == pytest.approx(expected, rel=1e-4)


def test_a_model_trains_as_the_serial_one_and_its_solution_is_kept(tmp_path: Path) -> None:
    spawn(_trains_as_serial, nprocs=4, file=str(tmp_path / "solution.json"))


def _refusals(rank: int, world_size: int, port: int, file: str) -> None:
    model = _start(rank, world_size, port)
    before = {name: p.clone() for name, p in model.named_parameters()}
    meta, fast = {"x": torch.empty(8, 16, device="meta")}, {(0, 1): (1e-6, 1e-9)}

    def refused(error: type[Exception], message: str, *args: Any, **options: Any) -> None:
        with pytest.raises(error, match=message):
            autoparallelize(model, *(args or (meta,)), alpha_beta_dict=fast, **options)
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())

    refused(
        InfeasibleBudgetError,
        r"memory_budget=100 bytes: the smallest plan needs \d+ bytes",
        memory_budget=100,
    )
    for budget in (0, True, None, float("nan"), float("inf"), -2):
        refused(ValueError, f"memory_budget={budget}; expected bytes, a text such as", memory_budget=budget)
    refused(InfeasibleBudgetError, r"memory_budget=100 bytes: the smallest plan", memory_budget="100 B")
    refused(ValueError, "memory_budget='much': a size is a number of bytes, or a text", memory_budget="much")
    refused(TypeError, "autoparallelize has no option 'speed'; those of its search are .*gap", speed=2)
    refused(ValueError, "gap='much'; expected a number from 0", gap="much")
    refused(ValueError, "time_limit='5 s'; expected seconds >= 0", time_limit="5 s")
    for states in (-1, "two", True):
        refused(ValueError, f"optimizer_states={states!r}; expected how many", optimizer_states=states)
    for name in ("activation_checkpoint", "tie"):
        refused(ValueError, f"{name}='yes'; expected True or False", **{name: "yes"})
    refused(ValueError, "solver_preference='fast'; expected one of 'standard'", solver_preference="fast")
    refused(ValueError, "meta_args=7; expected a dict of the arguments of forward", 7)
    refused(ValueError, r"mesh_shape \(2, 2\) has 4 places", logical_mesh_shape=(2, 2))
    refused(ValueError, "meta_args names 'y'", {"y": torch.empty(8, 16)})
    refused(ValueError, "they do not fit the model.*reduction dim", {"x": torch.empty(8, 17)})
    refused(ValueError, "solver_preference|solver_perference", solver_preference="fast")
    refused(ValueError, "needs solver_solution_path", save_solver_solution=True)
    refused(ValueError, "no such file", load_solver_solution=True, solver_solution_path=file + ".not")
    # ranks that do not have the same batch
    refused(
        ValueError, "meta_args of rank 0=0 x 1=1 of the mesh differ", {"x": torch.empty(8 + 2 * rank, 16)}
    )
    if rank == 0:
        Path(file).write_text("{}", encoding="utf-8")
    torch.distributed.barrier()
    refused(ValueError, "holds no solution", load_solver_solution=True, solver_solution_path=file)
    planned = autoparallelize(model, meta, alpha_beta_dict=fast, memory_budget="1 GiB")
    with pytest.raises(ValueError, match="autoparallelize was called on this model before"):
        autoparallelize(planned, meta, alpha_beta_dict=fast)


def test_what_does_not_fit_is_one_error_on_every_rank(tmp_path: Path) -> None:
    spawn(_refusals, nprocs=2, file=str(tmp_path / "solution.json"))


def test_one_device_changes_nothing() -> None:
    model = Mlp()
    with fake_world(0, 1):
        made, solution = autoparallelize(model, {"x": torch.zeros(8, 16)}, return_solution=True)
    assert made is model
    assert solution == []


def test_a_solution_of_another_model_or_mesh_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "solution.json"
    solution = solve_solution(constructor("mlp", grid(2, 2)))
    solution.save(file)
    assert list(load_solution(file, constructor("mlp", grid(2, 2)).problem)) == list(solution)
    other = build_strategy_constructor(trace_model(Mlp(32), torch.zeros(8, 16)), grid(2, 2))
    with pytest.raises(ValueError, match="that of another model"):
        load_solution(file, other.problem)
    with pytest.raises(ValueError, match=r"is for a mesh of shape \[2, 2\], and this one has \[1, 4\]"):
        load_solution(file, constructor("mlp", grid(1, 4)).problem)
    replicated = constructor("mlp", grid(2, 2), shard_option="full_shard").problem
    with pytest.raises(ValueError, match="which it does not have under these options"):
        load_solution(file, replicated)


def test_a_solution_is_a_table_with_reasons() -> None:
    solution = solve_solution(constructor("gpt2", grid(2, 2)))
    assert solution[1].startswith("transformer_wte ")
    rows = {row.operation: row for row in solution.rows}
    assert "arange" not in rows  # of constants
    row = rows["lm_head"]
    assert row.why in ("cheapest by itself", "saves conversions")
    assert row.extra is not None
    assert row.extra >= 0
    text = str(solution)
    assert text.splitlines()[0].split() == [
        "operation",
        "strategy",
        "why",
        "ms",
        "MB",
        "sent",
        "runner-up",
        "ms",
        "more",
    ]
    assert "no plan costs less than" in text


def test_the_shapes_of_a_batch_are_taken_from_a_data_loader() -> None:
    loader = [(torch.zeros(4, 16), torch.zeros(4, dtype=torch.long))]
    found = extract_meta_args_from_dataloader(loader, lambda batch: {"x": batch[0]}, parts=2)
    assert found["x"].shape == (8, 16)
    assert found["x"].is_meta
    with pytest.raises(ValueError, match="is an iterator"):
        extract_meta_args_from_dataloader(iter(loader))
    with pytest.raises(ValueError, match="has no batch"):
        extract_meta_args_from_dataloader([])


def test_costs_of_axes_are_those_of_their_slowest_link() -> None:
    alpha, beta = extract_alpha_beta_for_device_mesh(COSTS, (2, 2))
    assert (alpha, beta) == ([1e-6, 1e-6], [1e-8, 1e-9])
    with pytest.raises(ValueError, match="no entry for the ranks 0 and 4"):
        extract_alpha_beta_for_device_mesh(COSTS, torch.tensor([[0, 1], [4, 5]]))
    with fake_world(0, 4), pytest.raises(ValueError, match="has 2 devices, and the job has 4 ranks"):
        initialize_device_mesh(physical_devices=[0, 1], alpha_beta_dict=COSTS)


def test_a_whole_job_is_planned_and_transformed_in_one_process() -> None:
    with fake_world(0, 8):
        mesh = initialize_device_mesh(logical_mesh_shape=(2, 4))
        model = initialize_model(
            Mlp(), {"x": torch.zeros(8, 16)}, mesh, solver_preference="tp", shard_option="full_shard"
        )
        assert sum(p.numel() for p in model.parameters()) < sum(p.numel() for p in Mlp().parameters())


def _measured(rank: int, world_size: int, port: int) -> DevicePreset | None:
    colossalai.launch({}, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    known = {pair: COSTS[pair] for pair in ((0, 1), (1, 0))}
    assert initialize_device_mesh(alpha_beta_dict=known).cpu is None
    mesh = initialize_device_mesh(logical_mesh_shape=(1, 2))
    assert mesh.flatten().cpu is mesh.cpu
    return mesh.cpu


def test_cpus_are_measured_with_their_links_and_plans_take_their_speed() -> None:
    one, other = spawn(_measured, 2)
    assert one is not None
    assert one == other
    graph, mesh = trace_model(Mlp(), torch.zeros(8, 16)), grid(2, 2)
    fast = build_strategy_constructor(graph, mesh).problem
    mesh.cpu = replace(DEVICES["cpu"], single=1e8, half=1e8, memory=1e8)
    slow = build_strategy_constructor(graph, mesh, model=Mlp()).problem
    first = [0] * len(fast.vertices)
    assert predicted_step(slow, first).compute > 5 * predicted_step(fast, first).compute


def test_what_is_alive_after_each_operation() -> None:
    graph = trace_model(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), torch.zeros(2, 4))
    stages = GraphAnalyser(graph.module).liveness_analysis()
    assert [stage.node.name for stage in stages] == ["linear", "relu_"]
    assert stages[0].all_live_vars.exists("linear")
    assert not stages[-1].all_live_vars.exists("input_1")
    assert [v.name for v in stages[-1].all_live_vars if v.is_inplace] == ["relu_"]


def test_a_module_is_called_with_further_arguments() -> None:
    class Sum(nn.Module):
        def forward(self, a: int, b: int, c: int = 0) -> int:
            return a + 10 * b + 100 * c

    assert ModuleWrapper(Sum(), 2, c=3)(1) == 321


def test_a_solution_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = constructor("mlp", grid(2, 2), shard_option="full_shard")
    solution = solve_solution(found)
    solution.draw(tmp_path / "plan.svg")
    drawn = (tmp_path / "plan.svg").read_text()
    assert "conversions of operands" in drawn
