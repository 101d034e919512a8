"""An empty folder, but for the module that a test file has as MYMODEL."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from procpipe.launch.plan import subject, trial


@pytest.fixture(autouse=True)
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mymodel", raising=False)
    monkeypatch.setattr(subject, "_BUDGET_S", 0.0)  # as few rounds as possible
    monkeypatch.setattr(trial, "_MAX_STEPS", 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if text := getattr(request.module, "MYMODEL", ""):
        (tmp_path / "mymodel.py").write_text(text)
    return tmp_path
