"""Pipeline-parallel training for PyTorch with one process per stage.

    torchrun --nproc_per_node=4 train.py

See ``Stage`` for what to write in ``train.py``.
"""

from procpipe import torch_versions  # noqa: F401 - first, as it refuses versions of torch

# isort: split
from typing import TYPE_CHECKING, Any

from procpipe.batchnorm import DeferredBatchNorm
from procpipe.compute.recompute import is_checkpointing, is_recomputing
from procpipe.data.microbatch import NoChunk
from procpipe.data.remote import Remote
from procpipe.errors import (
    BalanceError,
    BoundaryError,
    CallMismatchError,
    DisagreementError,
    NonFiniteLossError,
    OverwrittenError,
    PeerLostError,
    PlanError,
    ProcpipeError,
    RecomputeError,
    RemoteStageError,
    RemoteValueError,
    SavedStateError,
    StageClosedError,
    WaitTimeoutError,
)
from procpipe.run.statistics import StageStatistics
from procpipe.stage import Stage
from procpipe.version import __version__

if TYPE_CHECKING:
    from procpipe.cutting import sequential

__all__ = [
    "BalanceError",
    "BoundaryError",
    "CallMismatchError",
    "DeferredBatchNorm",
    "DisagreementError",
    "NoChunk",
    "NonFiniteLossError",
    "OverwrittenError",
    "PeerLostError",
    "PlanError",
    "ProcpipeError",
    "RecomputeError",
    "Remote",
    "RemoteStageError",
    "RemoteValueError",
    "SavedStateError",
    "Stage",
    "StageClosedError",
    "StageStatistics",
    "WaitTimeoutError",
    "__version__",
    "is_checkpointing",
    "is_recomputing",
    "sequential",
]


def __getattr__(name: str) -> Any:
    """Import what is optional where it is used."""
    if name != "sequential":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from procpipe.cutting import sequential

    return sequential
