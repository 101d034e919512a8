"""Which versions of torch are refused, and how."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from procpipe.torch_versions import OLDEST, TESTED, release_of

ROOT = Path(__file__).parents[1]


def import_procpipe_beside(torch_version: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Import procpipe in a process whose torch has only a version."""
    (folder / "torch.py").write_text(f"__version__ = {torch_version!r}\n")
    code = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(ROOT)!r}]; import procpipe"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.dist
@pytest.mark.parametrize("version", ["2.10.1a0+gitabc", "1.13.1"])
def test_an_older_torch_is_one_clear_error(version, tmp_path):
    ended = import_procpipe_beside(version, tmp_path)

    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        f"ImportError: procpipe needs torch 2.11 or newer, but this is torch {version}: versions "
        "2.11, 2.13, 2.15 are tested; install one with pip install 'torch>=2.11'"
    )


@pytest.mark.dist
@pytest.mark.parametrize("version", ["2.11.0+cu130", "a1b2c3d"])
def test_newer_and_unknown_versions_are_accepted(version, tmp_path):
    ended = import_procpipe_beside(version, tmp_path)

    assert "procpipe needs" not in ended.stderr
    assert "'torch'" in ended.stderr.splitlines()[-1]  # which has no nn, Tensor, …


def test_the_package_requires_what_is_checked():
    required = re.search(r'"torch>=(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text())

    assert required is not None
    assert tuple(map(int, required.groups())) == OLDEST


def test_the_tests_run_under_the_oldest_and_the_newest_release():
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    [supported] = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SUPPORTED"
    ]
    releases = [release_of(version) for version in supported]

    assert tuple(releases) == TESTED
