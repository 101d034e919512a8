"""The private names of torch that procpipe uses; that it uses no others is checked by ruff."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroupGloo

from procpipe import torch_internals
from procpipe.compute import split
from procpipe.torch_versions import RELEASE, TESTED

GLOO: Any = ProcessGroupGloo  # torch's stubs leave its options out


def nccl() -> Any:
    if not torch.distributed.is_nccl_available():
        pytest.skip("this torch is built without NCCL")
    return torch.distributed.ProcessGroupNCCL


#: How to find what has private names, and these.
NAMES = {
    "autograd": (lambda: torch.autograd.graph, "_engine_run_backward"),
    "functions": (lambda: torch._C, "_are_functorch_transforms_active"),
    "modules": (lambda: nn.Module(), "_call_impl _compiled_call_impl _non_persistent_buffers_set"),
    "hooks": (
        lambda: nn.Module(),
        "_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks",
    ),
    "compiled": (lambda: torch.compile(print, backend="eager"), "_torchdynamo_orig_callable"),
    "compiler": (lambda: torch.compiler, "_is_compiling_flag"),
    "FSDP": (lambda: fsdp_module(), "_get_fsdp_state"),
    "state of FSDP": (lambda: state_of_fsdp(), "_pre_forward _post_forward _mp_policy"),
    "norms": (lambda: nn.modules.batchnorm, "_BatchNorm"),
    "gloo": (lambda: GLOO, "_Options"),
    "options of gloo": (lambda: GLOO._Options(), "_timeout _devices"),
    "NCCL": (lambda: nccl(), "_start_coalescing _end_coalescing"),
    "options of NCCL": (lambda: nccl().Options(), "_timeout"),
    "config of NCCL": (lambda: nccl().Options().config, "max_ctas"),
    "scaler": (lambda: torch.amp.GradScaler, "_unscale_grads_"),
    "profiler": (lambda: torch.autograd.profiler, "_is_profiler_enabled"),
    "FLOPs": (lambda: torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu _grouped_mm"),
    "shapes": (lambda: importlib.import_module("torch._subclasses"), "FakeTensorMode"),
}


def fsdp_module() -> Any:
    from torch.distributed.fsdp import FSDPModule

    return FSDPModule


def state_of_fsdp() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    torch.distributed.init_process_group("fake", rank=0, world_size=2)
    try:
        layer = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2,)))
        assert isinstance(layer, FSDPModule)
        return layer._get_fsdp_state()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("where", NAMES)
def test_private_names_are_in_each_release(where):
    find, names = NAMES[where]
    if RELEASE in TESTED:
        assert [name for name in names.split() if not hasattr(find(), name)] == []


# -- without the names ---------------------------------------------------------------------------


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model.zero_grad()
    output = model(torch.ones(2, 3, 5, 5))
    torch_internals.run_backward((output,), (torch.ones_like(output),))
    gradients = [parameter.grad for parameter in model.parameters()]
    return [gradient.clone() for gradient in gradients if gradient is not None]


def test_gradients_are_the_same_without_the_engines_function(monkeypatch):
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(18, 1))
    expected = gradients_of(model)

    monkeypatch.setattr(torch_internals, "run_backward", torch.autograd.backward)
    assert all(map(torch.equal, gradients_of(model), expected))


def test_without_a_function_of_autograd_nothing_is_put_off(monkeypatch):
    layer = nn.Linear(2, 2)
    for name in ("stays", "are_functions_transformed"):
        monkeypatch.setattr(split, name, None, raising=False)
        layers = split.suited([layer])
        assert layers == ([layer] if name == "stays" else [])


def test_an_error_without_values_is_raised_and_not_logged_too(caplog):
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(caplog.handler)
    try:
        with pytest.raises(RuntimeError, match="reduction dim"), torch_internals.without_values():
            nn.Linear(3, 4)(torch.ones(2, 7))
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.records == []
