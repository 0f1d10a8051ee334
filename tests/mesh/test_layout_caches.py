"""What a layout remembers about itself stays with it: copies and other processes compute it anew."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

from colossalai.mesh import Layout

LAYOUT = Layout(
    (("dep", "row"), (), ("col",)), partial=frozenset({"a"}), spread=frozenset({"b"}), fused=(1, 1, 3)
)

LOOK_UP = """
import pickle, sys
from colossalai.mesh import Layout
layout = pickle.loads(bytes.fromhex(sys.argv[1]))
sums = dict(partial=frozenset({"a"}), spread=frozenset({"b"}))
other = Layout((("dep", "row"), (), ("col",)), **sums, fused=(1, 1, 3))
assert {other: 1}[layout] == 1
"""


def test_remembered_values() -> None:
    assert LAYOUT.dual() is LAYOUT.dual()
    assert LAYOUT.dual().dual() == LAYOUT
    assert LAYOUT.transposed().transposed() == LAYOUT
    assert hash(LAYOUT) == hash(Layout(LAYOUT.dims, LAYOUT.partial, LAYOUT.spread, LAYOUT.fused))
    for twin in (copy.deepcopy(LAYOUT), pickle.loads(pickle.dumps(LAYOUT))):
        assert twin == LAYOUT
        assert not {"_hash", "_dual", "_transposed"} & set(vars(twin))


def test_a_process_where_strings_have_other_hashes() -> None:
    hash(LAYOUT)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONHASHSEED": "4711"}
    sent = pickle.dumps(LAYOUT).hex()
    subprocess.run([sys.executable, "-c", LOOK_UP, sent], check=True, env=environment)
