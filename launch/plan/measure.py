"""Measures the layers of a model and this machine, for ``procpipe plan``.

Layers are measured on micro-batches of exactly the sizes that are tried.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection
from typing import Any

import torch

from procpipe.balance import profile_layers
from procpipe.data.loss import Loss
from procpipe.launch.plan.subject import MistakeError, Subject
from procpipe.model.cut import check_model
from procpipe.planner.layers import Machine, Table

#: For each size; longer if a round takes longer.
_BUDGET_S = 0.5

_COPY_BYTES = 16 << 20
_NUM_ROUNDS = 9

#: The host's work for a task, and from its end until a few bytes have reached another process.
_HOST_S, _CPU_HOP_S, _GPU_HOP_S = 200e-6, 50e-6, 20e-6

#: 16 lanes of PCIe 4: the least between two GPUs of one host.
_GPU_BYTES_PER_S = 20e9


def measure_layers(
    subject: Subject,
    sizes: Collection[int],
    device: torch.device | None,
    flops_per_s: float | None = None,
    show: Callable[[int, int], object] = lambda done, total: None,
) -> tuple[Table, ...]:
    """Measure a model's layers on each size of micro-batch; with ``flops_per_s``, estimate them.

    Calls ``show`` after each size with the number of those done, and of all.

    Raises:
        MistakeError: the model cannot be run on so many samples; or a ``Stage`` would refuse it.
    """
    try:
        check_model(subject.model)
    except ValueError as error:
        raise MistakeError(str(error)) from error
    strict = Loss(subject.loss_fn, None)  # as that of a stage

    def loss_of(output: Any, target: Any = None) -> Any:
        return strict.of(output, target)

    tables = []
    for size in sorted(sizes, reverse=True):  # what no size can be run on is an error of the first
        inputs, target = subject.micro_batch(size)
        try:
            table = profile_layers(
                subject.model,
                inputs,
                target=target,
                loss_fn=loss_of,
                timeout=_BUDGET_S,
                device=device,
                flops_per_s=flops_per_s,
            )
        except MistakeError:
            raise
        except Exception as error:
            raise _refused(subject, size, error, is_estimate=flops_per_s is not None) from error
        tables.append(table)
        show(len(tables), len(sizes))
    return tuple(reversed(tables))


def _refused(subject: Subject, size: int, error: Exception, *, is_estimate: bool) -> MistakeError:
    where = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    reason = f"{where}: {type(error).__name__}: {error}"
    if is_estimate:
        return MistakeError(
            f"the model cannot be run without values{reason}; have it measured on real ones: "
            "procpipe plan mymodel:build --sample mymodel:sample, where build() returns "
            "hf.sequential(model)"
        )
    if size == subject.batch:
        return MistakeError(f"the model cannot be run on the sample{reason}")
    samples = f"{size} sample{'' if size == 1 else 's'}"
    return MistakeError(
        f"the model cannot be run on micro-batches of {samples}{reason}; give the numbers of "
        f"--chunks to try, fewer than {-(-subject.batch // size)}"
    )


def measure_machine(device: torch.device) -> tuple[Machine, str]:
    """Measure a message from one device to the next by copying; also return how, in words.

    The host's work for a task is assumed.
    """
    places, hop_s, how = (device, device), _CPU_HOP_S, "a copy in memory, measured"
    if device.type == "cuda":
        if torch.cuda.device_count() == 1:
            return assumed_machine(), "assumed, as there is one GPU: --bandwidth"
        places = torch.device("cuda:0"), torch.device("cuda:1")
        hop_s, how = _GPU_HOP_S, "a copy from GPU 0 to GPU 1, measured"
    source, destination = (
        torch.ones(_COPY_BYTES, dtype=torch.uint8, device=place) for place in places
    )
    copy_s = _seconds(lambda: destination.copy_(source), places[1])
    return Machine(_HOST_S, copy_s / _COPY_BYTES, hop_s), how


def assumed_machine() -> Machine:
    """Return one with several GPUs."""
    return Machine(_HOST_S, 1 / _GPU_BYTES_PER_S, _GPU_HOP_S)


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    found_s = []
    for _ in range(_NUM_ROUNDS):
        begun = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found_s.append(time.perf_counter() - begun)
    return statistics.median(found_s)
