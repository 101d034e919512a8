"""The code in README.md is run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.dist.script import run_script

README = Path(__file__).parent.parent / "README.md"


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.dist
@pytest.mark.parametrize("nproc", [None, 2])
def test_the_readme_example_trains_and_has_no_branch_on_the_rank(nproc: int | None) -> None:
    training, with_own_loss = python_blocks()
    assert "rank ==" not in training + with_own_loss
    code = "import torch\ntorch.manual_seed(0)\n" + training
    code += "input, target = loader[0]\noptimizer.zero_grad()\n" + with_own_loss
    code += "optimizer.step()\nstage.print('done')\n"
    done = run_script(code, nproc=nproc)
    done.check()
    losses = [float(line.split()[1]) for line in done.stdout.splitlines() if "loss" in line]
    assert len(losses) == 20
    assert losses[-1] < losses[0] + 0.1
    assert done.stdout.rstrip().endswith("done")
