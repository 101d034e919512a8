"""Errors of CUDA's driver; ``test_gpu_order.py`` tests what its calls do."""

from __future__ import annotations

import pytest
import torch

from procpipe.channel import gpu as gpu_module
from procpipe.channel.gpu import Gpu


@pytest.mark.parametrize(
    ("library", "words"),
    [
        ("libcuda-that-is-not.so.1", r"driver is missing, or too old \(libcuda-that"),
        ("libc.so.6", r"too old \(.*cuDeviceGet"),  # without the calls
    ],
)
def test_a_driver_that_is_missing_or_too_old(monkeypatch, library, words):
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(gpu_module, "_LIBRARY", library)
    with pytest.raises(RuntimeError, match=words) as caught:
        Gpu(torch.device("cuda", 3))
    assert str(caught.value).endswith("give each rank a GPU of its own")


@pytest.mark.gpu
def test_a_call_that_fails_is_an_error_with_the_drivers_text():
    gpu = Gpu(torch.device("cuda", 0))
    words = r"cuIpcCloseMemHandle failed on cuda:0: invalid argument \(1\); ranks that share a GPU"
    with pytest.raises(RuntimeError, match=words):
        gpu.close(8)


@pytest.mark.gpu
def test_torchs_cache_is_emptied_before_memory_runs_out(monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    with pytest.raises(torch.OutOfMemoryError, match="cuda:0 has no 1073741824 MiB for a message"):
        Gpu(torch.device("cuda", 0)).allocate(1 << 50)
    assert emptied == [True]
    assert not torch.zeros(1, device="cuda:0").any()  # an error of the driver is none of torch's
