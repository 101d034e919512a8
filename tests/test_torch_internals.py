"""The private names of torch that procpipe uses, and no others."""

from __future__ import annotations

import ast
import importlib
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroupGloo

from procpipe import torch_internals
from procpipe.compute import split
from procpipe.torch_versions import RELEASE, TESTED

ROOT = Path(__file__).parents[1]


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


#: Attributes of tensors, modules, named tuples and processes that are not private, or Python's.
USABLE = {
    *("_version", "_is_view", "_modules", "_parameters", "_buffers", "_metadata"),
    *("_replace", "_fields", "_exit", "_inst"),
    *("_current_frames", "_DummyThread", "_register_atexit"),
}


#: Names of classes of models in transformers, and of their configurations.
OF_TRANSFORMERS = {
    *("_can_record_outputs", "_keys_to_ignore_on_load_unexpected", "_init_weights"),
    *("_from_config", "_attn_implementation", "_experts_implementation"),
}


def test_no_other_module_uses_private_names_of_torch():
    """Nor any attribute with an underscore that no class of procpipe has."""
    paths = [path for folder in ("procpipe", "launch") for path in (ROOT / folder).rglob("*.py")]
    nodes = {path: [*ast.walk(ast.parse(path.read_text("utf-8")))] for path in paths}
    own = {name for of_file in nodes.values() for name in defined_by(of_file)}
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path, of_file in nodes.items()
        if path.stem != "torch_internals"
        for line, name in private_names_in(of_file, own)
        if not (path.parent.name in ("hf", "cutting") and name in OF_TRANSFORMERS)
    ]

    assert found == []
    inside = private_names_in(nodes[ROOT / "procpipe" / "torch_internals.py"], own)
    assert {"_Options", "_pytree", "_BatchNorm"} <= {name for _, name in inside}


def defined_by(nodes: list[ast.AST]) -> set[str]:
    found = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
            found |= {node.attr} if is_own else set()
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def private_names_in(nodes: list[ast.AST], own: set[str]) -> list[tuple[int, str]]:
    found = []
    for node in nodes:
        if isinstance(node, ast.Attribute):
            found.append((node.lineno, node.attr))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [alias.name for alias in node.names] + str(node.module).split(".")
            found += [(node.lineno, name) for name in names]
    return [
        (line, name) for line, name in found if re.match("_[^_]", name) and name not in own | USABLE
    ]


# -- without the names ---------------------------------------------------------------------------


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model.zero_grad()
    output = model(torch.ones(2, 3, 5, 5))
    torch_internals.run_backward((output,), (torch.ones_like(output),))
    gradients = [parameter.grad for parameter in model.parameters()]
    return [gradient.clone() for gradient in gradients if gradient is not None]


def test_gradients_are_right_without_the_engines_function(monkeypatch):
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(18, 1))
    expected = gradients_of(model)

    monkeypatch.setattr(torch_internals, "_engine", None)
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
