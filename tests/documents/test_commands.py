"""The command with which the older pages (21, 33, 35, 37, 38) start their scripts: PyTorch's first
launcher.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.cli.tools import environment_with_package, free_port
from tests.documents.pages import code
from tests.documents.scripts import WITHOUT_INDEX


def test_page_38_torch_distributed_launch(tmp_path: Path) -> None:
    """It hands ``--local-rank`` to the script."""
    config = code("38.config", ("BATCH_SIZE = 128", "BATCH_SIZE = 4"), ("NUM_EPOCHS = 300", "NUM_EPOCHS = 2"))
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config_AMP_torch.py").write_text(config)
    blocks = (
        "from tests.documents.scripts import as_it_is as Gray2RGB, install",
        "install()",
        code("38.imports"),
        code("38.launch"),
        code("38.components"),
        code("38.initialize"),
        code("38.train", WITHOUT_INDEX),
        "Path(f'loss_{args.local_rank}').write_text(str(loss.item()))",
    )
    (tmp_path / "train_with_engine.py").write_text("\n".join(blocks))
    command = (
        f"-m torch.distributed.launch --nproc_per_node 2 --master_addr localhost --master_port {free_port()}"
        " train_with_engine.py --config config/config_AMP_torch.py"
    )
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=tmp_path,
        env={**environment_with_package(), "OMP_NUM_THREADS": "1", "DATA": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(float((tmp_path / f"loss_{rank}").read_text()) > 0 for rank in (0, 1))
