"""Measures the layers of a model, and the link between devices, for ``procpipe plan``.

A layer is measured on micro-batches of up to three sizes: the smallest, the largest, and one
between. Other sizes are interpolated.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields, replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed import HashStore

from procpipe.balance import LayerProfile, Profile, profile_layers
from procpipe.data.loss import Loss
from procpipe.launch.plan.subject import MistakeError, SizeError, Subject
from procpipe.model.cut import check_model
from procpipe.model.ties import find_ties
from procpipe.planner.model import Layer, Link, Model, Skip, TiedLayers
from procpipe.replicas.gloo import GlooGroup

#: For each size; longer if three rounds take longer.
_BUDGET_S = 0.5

_COPY_BYTES = 16 << 20
_NUM_ROUNDS = 9
_GLOO_TIMEOUT_S = 60.0
_CPU = torch.device("cpu")

#: Of the matrices that are multiplied to measure FLOPs per second.
_CPU_WIDTH, _GPU_WIDTH = 1024, 8192

#: From the end of a task until a message of a few bytes has reached another process or device.
_CPU_LATENCY_S, _GPU_LATENCY_S = 50e-6, 20e-6

#: 16 lanes of PCIe 4: the least between two GPUs of one host.
_GPU_BYTES_PER_S = 20e9


def sizes_to_measure(all_sizes: Iterable[int]) -> tuple[int, ...]:
    """Choose sizes of micro-batches, at most three, in ascending order."""
    sizes = sorted(set(all_sizes))
    return tuple(sizes) if len(sizes) <= 3 else (sizes[0], sizes[len(sizes) // 2], sizes[-1])


def measure_model(
    subject: Subject,
    sizes: Sequence[int],
    device: torch.device,
    flops_per_s: float | None = None,
) -> Model:
    """Measure a model's layers on micro-batches of some sizes; with ``flops_per_s``, estimate them.

    Raises:
        SizeError: the model cannot be run on as many samples, or on any.
        MistakeError: a ``Stage`` would refuse it, whatever the balance.
    """
    try:
        check_model(subject.model)
    except ValueError as error:
        raise MistakeError(str(error)) from error
    strict = Loss(subject.loss_fn, None)  # as that of a stage

    def loss_of(output: Any, target: Any = None) -> Any:
        return strict.of(output, target)

    profiles = []
    for size in sizes:
        inputs, target = subject.micro_batch(size)
        try:
            profile = profile_layers(
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
            where = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            if flops_per_s is not None:
                raise MistakeError(
                    f"the model cannot be run without values{where}: {type(error).__name__}: "
                    f"{error}; have it measured on real ones: procpipe plan mymodel:build --sample "
                    "mymodel:sample, where build() returns hf.sequential(model)"
                ) from error
            raise SizeError(size, f"{where}: {type(error).__name__}: {error}") from error
        profiles.append(profile)
    return replace(_model(sizes, profiles), ties=ties_of(subject.model))


def ties_of(model: nn.Sequential) -> tuple[TiedLayers, ...]:
    """List the parameters and buffers that several layers use."""
    tensors = dict(chain(model.named_parameters(), model.named_buffers()))
    return tuple(
        TiedLayers(
            tie.name,
            tie.partitions,
            tensors[tie.name].nbytes,
            is_trained=tensors[tie.name].requires_grad,
        )
        for tie in find_ties([{name: layer} for name, layer in model.named_children()])
    )


def measure_rate(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Measure FLOPs per second, of a product of two large matrices; also return how, in words."""
    width = _GPU_WIDTH if device.type == "cuda" else _CPU_WIDTH
    one, other = (torch.ones(width, width, dtype=dtype, device=device) for _ in range(2))
    product_s = _seconds(lambda: one @ other, device)
    where = "this GPU" if device.type == "cuda" else "one CPU thread"
    return 2 * width**3 / product_s, f"a product of two {dtype_text(dtype)} matrices on {where}"


def dtype_text(dtype: torch.dtype) -> str:
    """Return a dtype's name, without the module."""
    return str(dtype).removeprefix("torch.")


def measure_link(device: torch.device, bytes_per_s: float | None) -> tuple[Link, str]:
    """Measure the link from one device to the next by copying; also return how, in words.

    With ``bytes_per_s``, nothing is measured.
    """
    if bytes_per_s:
        latency_s = _GPU_LATENCY_S if device.type == "cuda" else _CPU_LATENCY_S
        return Link(latency_s, bytes_per_s), "--bandwidth"
    if device.type != "cuda":
        source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
        destination = torch.empty_like(source)
        copy_s = _seconds(lambda: destination.copy_(source), device)
        link = Link(_CPU_LATENCY_S, _COPY_BYTES / (2 * copy_s))
        return link, f"two copies in memory at {_COPY_BYTES / copy_s / 1e9:.1f} GB/s, measured"
    if torch.cuda.device_count() > 1:
        source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device="cuda:0")
        destination = torch.empty_like(source, device="cuda:1")
        copy_s = _seconds(lambda: destination.copy_(source), destination.device)
        return Link(_GPU_LATENCY_S, _COPY_BYTES / copy_s), "a copy from GPU 0 to GPU 1, measured"
    return assumed_link(), "assumed, as there is one GPU: --bandwidth"


def measure_replica_link() -> tuple[Link, str]:
    """Measure the link between replicas on CPUs: what gloo adds up; also return how, in words."""
    store, found_s = HashStore(), []

    def add_up(rank: int) -> GlooGroup:
        group = GlooGroup(store, rank, 2, _GLOO_TIMEOUT_S, "127.0.0.1")
        tensor = torch.ones(_COPY_BYTES // 4)
        found_s.append(_seconds(lambda: group.torchs.allreduce([tensor]).wait(), _CPU))
        return group

    with ThreadPoolExecutor(2) as pool:
        for group in list(pool.map(add_up, range(2))):  # both have the last sum
            group.close()
    # As much is sent by each of two as is added up.
    return Link(_CPU_LATENCY_S, _COPY_BYTES / max(found_s)), "gloo between two threads, measured"


def assumed_link() -> Link:
    """Return a link between two GPUs of one host."""
    return Link(_GPU_LATENCY_S, _GPU_BYTES_PER_S)


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    found_s = []
    for _ in range(_NUM_ROUNDS):
        begun = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found_s.append(time.perf_counter() - begun)
    return statistics.median(found_s)


def _model(sizes: Sequence[int], profiles: Sequence[Profile]) -> Model:
    """Combine what was measured on each size."""
    losses = [profile.loss for profile in profiles if profile.loss is not None]
    start_f_s, start_b_s = (statistics.median(p.start_s[k] for p in profiles) for k in (0, 1))
    return Model(
        samples=tuple(sizes),
        layers=tuple(map(_layer, zip(*(profile.layers for profile in profiles), strict=True))),
        loss=_layer(losses) if losses else None,
        skips=tuple(
            Skip(
                of_sizes[0].source,
                of_sizes[0].destinations,
                _each(of_sizes, "tensor_bytes"),
                _each(of_sizes, "kept_bytes"),
            )
            for of_sizes in zip(*(profile.skips for profile in profiles), strict=True)
        ),
        input_bytes=_each(profiles, "input_bytes"),
        target_bytes=_each(profiles, "target_bytes") if profiles[0].target_bytes else (),
        start_s=(start_f_s, start_b_s),
    )


def _layer(of_sizes: Sequence[LayerProfile]) -> Layer:
    names = [field.name for field in fields(Layer) if field.type == "tuple[float, ...]"]
    return Layer(**{**asdict(of_sizes[-1]), **{name: _each(of_sizes, name) for name in names}})


def _each(of_sizes: Sequence[Any], name: str) -> tuple[float, ...]:
    return tuple(float(getattr(found, name)) for found in of_sizes)
