"""Measures or estimates the layers of a model, for ``procpipe plan``."""

from __future__ import annotations

from typing import Any

import torch

from procpipe.balance import profile_layers
from procpipe.data.loss import Loss
from procpipe.launch.plan.subject import MistakeError, Subject
from procpipe.planner.costs import Machine
from procpipe.planner.layers import Table
from procpipe.words import counted

#: For each size of micro-batch; longer if a round takes longer.
_BUDGET_S = 0.5

#: What is assumed before anything was measured in a pipeline: between GPUs of one host, at least 16
#: lanes of PCIe 4; between its processes, a copy in memory.
MACHINES = {
    "cuda": Machine(host_s=200e-6, send_s=1 / 20e9, hop_s=20e-6),
    "cpu": Machine(host_s=200e-6, send_s=1 / 5e9, hop_s=50e-6),
}


def measure_layers(
    subject: Subject, samples: int, device: torch.device | None, flops_per_s: float | None = None
) -> Table:
    """Measure a model's layers on a micro-batch of so many samples; or estimate, by FLOPs.

    Raises:
        MistakeError: the model cannot be run on so many samples.
    """
    strict = Loss(subject.loss_fn, None)  # as that of a stage

    def loss_of(output: Any, target: Any = None) -> Any:
        return strict.of(output, target)

    inputs, target = subject.micro_batch(samples)
    try:
        return profile_layers(
            subject.model,
            inputs,
            target=target,
            loss_fn=loss_of,
            timeout=_BUDGET_S,
            device=device,
            flops_per_s=flops_per_s,
        )
    except Exception as error:
        where = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        reason = f"{where}: {type(error).__name__}: {error}"
        if flops_per_s is not None:
            raise MistakeError(
                f"the model cannot be run without values{reason}; have it measured on real ones: "
                "procpipe plan mymodel:build --sample mymodel:sample, where build() returns "
                "hf.sequential(model)"
            ) from error
        raise MistakeError(
            f"the model cannot be run on a micro-batch of {counted(samples, 'sample')}{reason}; if "
            "these are too few, give smaller numbers of --chunks"
        ) from error
