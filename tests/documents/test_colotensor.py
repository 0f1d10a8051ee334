"""ColoTensor: the example of page 17; `tests.tensor.gpt2` runs the blocks of page 10."""

from __future__ import annotations

import contextlib
import io

from colossalai.testing import spawn
from tests.documents.pages import code
from tests.documents.scripts import install, run


def _example(rank: int, world_size: int, port: int) -> str:
    install()
    example = run(code("17.example", ("'nccl'", "'gloo'")))["run_dist_tests"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        example(rank, world_size, port)
    return out.getvalue()


def test_the_shapes_that_the_example_prints() -> None:
    first, *others = spawn(_example, 4)
    shapes = [line.partition(", tensor")[0] for line in first.splitlines() if line.startswith("shape")]
    assert shapes == [f"shape torch.Size([{sizes}])" for sizes in ("2, 3, 1", "2, 3, 2", "1, 3, 2")]
    assert not any("shape" in text for text in others)
