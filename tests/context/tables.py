"""The documented rank tables, written out by hand: what each parallel mode joins for a config and a world
size.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple


class Case(NamedTuple):
    world_size: int
    parallel: dict[str, Any]
    groups: dict[str, str]

    def __str__(self) -> str:
        tensor = self.parallel.get("tensor", {})
        pipeline = self.parallel.get("pipeline", 1)
        cut = f"-sp{self.parallel['sequence']['size']}" if "sequence" in self.parallel else ""
        return f"{self.world_size}-pp{pipeline}{cut}-{tensor.get('mode')}{tensor.get('size', 1)}"


SINGLES_4 = "(0)(1)(2)(3)"
SINGLES_8 = "(0)(1)(2)(3)(4)(5)(6)(7)"
SINGLES_16 = SINGLES_8 + "(8)(9)(10)(11)(12)(13)(14)(15)"
ALL_4 = "(0,1,2,3)"
ALL_8 = "(0,1,2,3,4,5,6,7)"
ALL_16 = "(0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15)"
PAIRS_8 = "(0,1)(2,3)(4,5)(6,7)"
PAIRS_16 = PAIRS_8 + "(8,9)(10,11)(12,13)(14,15)"
STEP2_8 = "(0,2)(1,3)(4,6)(5,7)"
STEP2_16 = STEP2_8 + "(8,10)(9,11)(12,14)(13,15)"
STEP4_8 = "(0,4)(1,5)(2,6)(3,7)"
STEP4_16 = STEP4_8 + "(8,12)(9,13)(10,14)(11,15)"
STEP8_16 = "(0,8)(1,9)(2,10)(3,11)(4,12)(5,13)(6,14)(7,15)"
FOURS_8 = "(0,1,2,3)(4,5,6,7)"
FOURS_16 = FOURS_8 + "(8,9,10,11)(12,13,14,15)"
EIGHTS_16 = "(0,1,2,3,4,5,6,7)(8,9,10,11,12,13,14,15)"

TABLES = [
    Case(
        4,
        {},
        {"GLOBAL": ALL_4, "DATA": ALL_4, "MODEL": SINGLES_4, "PIPELINE": SINGLES_4, "TENSOR": SINGLES_4},
    ),
    Case(
        4,
        {"tensor": {"size": 2, "mode": "sequence"}},
        {
            "GLOBAL": ALL_4,
            "DATA": "(0,2)(1,3)",
            "MODEL": "(0,1)(2,3)",
            "PIPELINE": SINGLES_4,
            "TENSOR": "(0,1)(2,3)",
            "SEQUENCE": "(0,1)(2,3)",
            "SEQUENCE_DP": ALL_4,
        },
    ),
    Case(
        8,
        {"sequence": {"size": 2}, "tensor": {"size": 2, "mode": "1d"}},
        {
            "GLOBAL": ALL_8,
            "DATA": STEP4_8,
            "MODEL": FOURS_8,
            "PIPELINE": SINGLES_8,
            "TENSOR": PAIRS_8,
            "PARALLEL_1D": PAIRS_8,
            "SEQUENCE": STEP2_8,
            "SEQUENCE_DP": "(0,2,4,6)(1,3,5,7)",
        },
    ),
    Case(
        8,
        {"pipeline": 2, "sequence": {"size": 4, "attention": "both"}},
        {
            "GLOBAL": ALL_8,
            "DATA": SINGLES_8,
            "MODEL": ALL_8,
            "PIPELINE": STEP4_8,
            "TENSOR": SINGLES_8,
            "SEQUENCE": FOURS_8,
            "SEQUENCE_DP": FOURS_8,
        },
    ),
    Case(
        4,
        {"data": 1, "pipeline": 1, "tensor": {"size": 4, "mode": "2d"}},
        {
            "GLOBAL": ALL_4,
            "DATA": SINGLES_4,
            "MODEL": ALL_4,
            "PIPELINE": SINGLES_4,
            "TENSOR": ALL_4,
            "PARALLEL_2D_ROW": "(0,1)(2,3)",
            "PARALLEL_2D_COL": "(0,2)(1,3)",
        },
    ),
    Case(
        8,
        {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}},
        {
            "GLOBAL": ALL_8,
            "DATA": STEP4_8,
            "MODEL": FOURS_8,
            "PIPELINE": STEP2_8,
            "TENSOR": PAIRS_8,
            "PARALLEL_1D": PAIRS_8,
        },
    ),
    Case(
        8,
        {"tensor": {"size": 4, "mode": "2d"}},
        {
            "GLOBAL": ALL_8,
            "DATA": STEP4_8,
            "MODEL": FOURS_8,
            "PIPELINE": SINGLES_8,
            "TENSOR": FOURS_8,
            "PARALLEL_2D_ROW": PAIRS_8,
            "PARALLEL_2D_COL": STEP2_8,
        },
    ),
    Case(
        8,
        {"tensor": {"size": 8, "mode": "2.5d", "depth": 2}},
        {
            "GLOBAL": ALL_8,
            "DATA": SINGLES_8,
            "MODEL": ALL_8,
            "PIPELINE": SINGLES_8,
            "TENSOR": ALL_8,
            "PARALLEL_2P5D_ROW": PAIRS_8,
            "PARALLEL_2P5D_COL": STEP2_8,
            "PARALLEL_2P5D_DEP": STEP4_8,
            "PARALLEL_2P5D_XZ": "(0,2,4,6)(1,3,5,7)",
        },
    ),
    Case(
        8,
        {"tensor": {"size": 8, "mode": "3d"}},
        {
            "GLOBAL": ALL_8,
            "DATA": SINGLES_8,
            "MODEL": ALL_8,
            "PIPELINE": SINGLES_8,
            "TENSOR": ALL_8,
            "PARALLEL_3D_INPUT": STEP2_8,
            "PARALLEL_3D_WEIGHT": PAIRS_8,
            "PARALLEL_3D_OUTPUT": STEP4_8,
            "PARALLEL_3D_INPUT_X_WEIGHT": FOURS_8,
            "PARALLEL_3D_OUTPUT_X_WEIGHT": "(0,1,4,5)(2,3,6,7)",
        },
    ),
    Case(
        8,
        {"pipeline": 2, "tensor": {"size": 2, "mode": "sequence"}},
        {
            "GLOBAL": ALL_8,
            "DATA": STEP4_8,
            "MODEL": FOURS_8,
            "PIPELINE": STEP2_8,
            "TENSOR": PAIRS_8,
            "SEQUENCE": PAIRS_8,
            "SEQUENCE_DP": "(0,1,4,5)(2,3,6,7)",
        },
    ),
    Case(
        16,
        {"pipeline": 2, "tensor": {"size": 4, "mode": "2d"}},
        {
            "GLOBAL": ALL_16,
            "DATA": STEP8_16,
            "MODEL": EIGHTS_16,
            "PIPELINE": STEP4_16,
            "TENSOR": FOURS_16,
            "PARALLEL_2D_ROW": PAIRS_16,
            "PARALLEL_2D_COL": STEP2_16,
        },
    ),
    Case(
        16,
        {"tensor": {"size": 16, "mode": "2d"}},
        {
            "GLOBAL": ALL_16,
            "DATA": SINGLES_16,
            "MODEL": ALL_16,
            "PIPELINE": SINGLES_16,
            "TENSOR": ALL_16,
            "PARALLEL_2D_ROW": FOURS_16,
            "PARALLEL_2D_COL": "(0,4,8,12)(1,5,9,13)(2,6,10,14)(3,7,11,15)",
        },
    ),
    Case(
        16,
        {"tensor": {"size": 8, "mode": "2.5d", "depth": 2}},
        {
            "GLOBAL": ALL_16,
            "DATA": STEP8_16,
            "MODEL": EIGHTS_16,
            "PIPELINE": SINGLES_16,
            "TENSOR": EIGHTS_16,
            "PARALLEL_2P5D_ROW": PAIRS_16,
            "PARALLEL_2P5D_COL": STEP2_16,
            "PARALLEL_2P5D_DEP": STEP4_16,
            "PARALLEL_2P5D_XZ": "(0,2,4,6)(1,3,5,7)(8,10,12,14)(9,11,13,15)",
        },
    ),
    Case(
        16,
        {"pipeline": 2, "tensor": {"size": 8, "mode": "3d"}},
        {
            "GLOBAL": ALL_16,
            "DATA": SINGLES_16,
            "MODEL": ALL_16,
            "PIPELINE": STEP8_16,
            "TENSOR": EIGHTS_16,
            "PARALLEL_3D_INPUT": STEP2_16,
            "PARALLEL_3D_WEIGHT": PAIRS_16,
            "PARALLEL_3D_OUTPUT": STEP4_16,
            "PARALLEL_3D_INPUT_X_WEIGHT": FOURS_16,
            "PARALLEL_3D_OUTPUT_X_WEIGHT": "(0,1,4,5)(2,3,6,7)(8,9,12,13)(10,11,14,15)",
        },
    ),
    Case(
        16,
        {"pipeline": 4, "tensor": {"size": 2, "mode": "1d"}},
        {
            "GLOBAL": ALL_16,
            "DATA": STEP8_16,
            "MODEL": EIGHTS_16,
            "PIPELINE": "(0,2,4,6)(1,3,5,7)(8,10,12,14)(9,11,13,15)",
            "TENSOR": PAIRS_16,
            "PARALLEL_1D": PAIRS_16,
        },
    ),
]


def as_groups(case: Case) -> dict[str, list[list[int]]]:
    """The table of ``case`` as lists of ranks by the name of the mode."""
    return {
        mode: [[int(r) for r in group.split(",")] for group in re.findall(r"\(([\d,]+)\)", text)]
        for mode, text in case.groups.items()
    }
