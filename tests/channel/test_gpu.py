"""Errors of CUDA's driver; ``test_gpu_order.py`` tests what its calls do."""

from __future__ import annotations

import pytest
import torch

from procpipe.channel.gpu import Gpu


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
