"""Writes the saved states of several versions of torch that ``test_versions.py`` loads.

    python -m tests.state.of_versions

Run by a version of torch, it writes ``tests/state/saved/<release>.tar.xz``: a state saved here, and
one that plain torch.distributed.checkpoint has saved. Commit it when a release is added.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from procpipe import state

FOLDER = Path(__file__).parent / "saved"

EXTRA = {"more": [1, 2.5, "text"]}


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer after a step, the same under every torch."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()
    with torch.no_grad():
        for k, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) / 4 + k)
            parameter.grad = torch.ones_like(parameter)
    model.get_buffer("1.running_mean").fill_(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    optimizer.step()
    return model, optimizer


def save_plain(folder: Path) -> None:
    """Save with torch alone, in the form that every torch can load."""
    model, optimizer = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    theirs = get_optimizer_state_dict(model, optimizer, options=options)
    values = {"model": model.state_dict(), "optimizer": theirs}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(values, checkpoint_id=folder, no_dist=True)


def load_plain(folder: Path) -> dict[str, Any]:
    """Load with torch alone; return the model's values."""
    model, _ = trained()
    values = {"model": {key: torch.zeros_like(value) for key, value in model.state_dict().items()}}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(values, checkpoint_id=folder, no_dist=True)
    return values["model"]


def save_ours(folder: Path) -> Path:
    """Save as a script does, in a new folder; return where the state is."""
    torch.manual_seed(0)
    return state.save(folder, *trained(), extra=dict(EXTRA), step=1).path


if __name__ == "__main__":
    release = ".".join(torch.__version__.split(".")[:2])
    with tempfile.TemporaryDirectory() as folder:
        save_plain(Path(folder, "plain"))
        save_ours(Path(folder, "ours"))
        shutil.make_archive(str(FOLDER / release), "xztar", folder)
