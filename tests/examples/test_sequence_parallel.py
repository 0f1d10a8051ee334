"""The tutorial about cut sequences: its command and lines, as its page has them; then only the config
changes.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from colossalai.amp import AMP_TYPE
from colossalai.context import Config
from tests.cli.tools import Command, free_port
from tests.examples.scripts import EXAMPLES, changed_config, run_script

FOLDER = EXAMPLES / "tutorial" / "sequence_parallel"
# what takes time: fp16 on a CPU
QUICK = (
    ("VOCAB_SIZE = 30528", "VOCAB_SIZE = 300"),
    ("SEQ_LENGTH = 128", "SEQ_LENGTH = 18"),  # does not divide
    ("GLOBAL_BATCH_SIZE = 32", "GLOBAL_BATCH_SIZE = 8"),
    ("HIDDEN_SIZE = 128", "HIDDEN_SIZE = 32"),
)
LINES = (
    r"Dataloaders are built",
    r"Model is built with softmax in fp32 = True",
    r"This model has \d+ parameters",
    r"Criterion is built",
    r"without weight decay param: \d+, with weight decay param: \d+",
    r"Optimizer is built",
    r"LR Scheduler is built with 0 warmup steps and 4 decay steps",
    r"start training",
    r"Step 10 / 10 \| Train Loss: (\S+) \| Eval Loss: (\S+) \| Loss Scale: [\d.]+\| Learning rate: 1e-05"
    r" \| train-iterations: [\d.]+ms",
)


def losses(text: str) -> list[float]:
    """Those of the last line, after all lines were found in their order."""
    found = re.search(".*?".join(LINES), text, re.DOTALL)
    assert found is not None, text
    return [float(loss) for loss in found.groups()]


def test_the_command_of_the_page(tmp_path: Path) -> None:
    config = changed_config(FOLDER, tmp_path / "config.py", *QUICK)
    command = ["--master_port", free_port(), "train.py", "-s", "--config", config]
    done = Command("run", "--nproc_per_node", 4, *command, cwd=FOLDER).finish(seconds=240)
    assert done.code == 0, done
    # random tokens teach nothing
    assert losses(done.out + done.err) == pytest.approx([math.log(300)] * 2, abs=0.2)


@pytest.mark.parametrize(
    "parallel",
    [
        'parallel = dict(pipeline=2, tensor=dict(size=2, mode="sequence"))',
        pytest.param("parallel = dict(sequence=dict(size=4, attention='both'))", marks=pytest.mark.slow),
        pytest.param("parallel = dict(sequence=2, tensor=dict(size=2, mode='1d'))", marks=pytest.mark.slow),
    ],
)
def test_only_the_config_changes(parallel: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("colourless green ideas sleep furiously\n" * 40)
    before = 'parallel = dict(pipeline=1, tensor=dict(size=2, mode="sequence"))'
    # at this scale no step is skipped: where sequences are cut, gradients are larger until they are averaged
    scale = ("verbose=True", "verbose=True, initial_scale=2**12")
    config = changed_config(
        FOLDER, tmp_path / "config.py", *QUICK, (before, parallel), ("LR = 0.0001", "LR = 0.01"), scale
    )
    shown = run_script(
        "tutorial/sequence_parallel/train.py",
        "--config",
        config,
        "--data",
        tmp_path / "text.txt",
        nprocs=4,
    )
    assert losses(shown)[1] < math.log(300) - 0.5  # few letters, learnt in ten steps
    assert "WARNING" not in shown


def test_the_variables_of_the_config() -> None:
    config = dict(Config.from_file(FOLDER / "config.py"))
    assert config.pop("fp16") == {"mode": AMP_TYPE.NAIVE, "verbose": True}
    assert config.pop("gradient_handler") == [{"type": "SequenceParallelGradientHandler"}]
    assert config.pop("parallel") == {"pipeline": 1, "tensor": {"size": 2, "mode": "sequence"}}
    assert config == {
        "TRAIN_ITERS": 10,
        "DECAY_ITERS": 4,
        "WARMUP_FRACTION": 0.01,
        "GLOBAL_BATCH_SIZE": 32,
        "EVAL_ITERS": 10,
        "EVAL_INTERVAL": 10,
        "LR": 0.0001,
        "MIN_LR": 1e-05,
        "WEIGHT_DECAY": 0.01,
        "SEQ_LENGTH": 128,
        "DEPTH": 4,
        "NUM_ATTENTION_HEADS": 4,
        "HIDDEN_SIZE": 128,
        "VOCAB_SIZE": 30528,
        "NUM_MICRO_BATCHES": 4,
        "SEED": 1234,
    }
