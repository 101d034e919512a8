"""The private names of torch that procpipe uses, in which releases they are, and no others."""

from __future__ import annotations

import ast
import importlib
import inspect
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroupGloo

from procpipe import torch_internals
from procpipe.compute import split
from procpipe.torch_versions import RELEASE, TESTED
from tests.sources import nodes_of, tree_of

ROOT = Path(__file__).parents[1]


GLOO: Any = ProcessGroupGloo  # torch's stubs leave its options out


def nccl() -> Any:
    if not torch.distributed.is_nccl_available():
        pytest.skip("this torch is built without NCCL")
    return torch.distributed.ProcessGroupNCCL


def options_of_nccl() -> Any:
    return nccl().Options()


#: How to find each name, and the releases that have it.
NAMES = {
    "_engine_run_backward": (lambda: torch.autograd.graph, TESTED),
    "_are_functorch_transforms_active": (lambda: torch._C, TESTED),
    "_call_impl": (lambda: nn.Module, TESTED),
    "_compiled_call_impl": (lambda: nn.Module, TESTED),
    "_forward_hooks": (lambda: nn.Module(), TESTED),
    "_forward_pre_hooks": (lambda: nn.Module(), TESTED),
    "_backward_hooks": (lambda: nn.Module(), TESTED),
    "_backward_pre_hooks": (lambda: nn.Module(), TESTED),
    "_non_persistent_buffers_set": (lambda: nn.Module(), TESTED),
    "_is_compiling_flag": (lambda: torch.compiler, TESTED),
    "_get_fsdp_state": (lambda: fsdp_module(), TESTED),
    "_pre_forward": (lambda: state_of_fsdp(), TESTED),
    "_post_forward": (lambda: state_of_fsdp(), TESTED),
    "_mp_policy": (lambda: state_of_fsdp(), TESTED),
    "_fsdp_param_group": (lambda: state_of_fsdp(), TESTED),
    "_BatchNorm": (lambda: nn.modules.batchnorm, TESTED),
    "_Options": (lambda: GLOO, TESTED),
    "_timeout of gloo": (lambda: GLOO._Options(), TESTED),
    "_devices": (lambda: GLOO._Options(), TESTED),
    "_timeout of NCCL": (lambda: options_of_nccl(), TESTED),
    "max_ctas": (lambda: options_of_nccl().config, TESTED),
    "_start_coalescing": (lambda: nccl(), TESTED),
    "_end_coalescing": (lambda: nccl(), TESTED),
    "_unscale_grads_": (lambda: torch.amp.GradScaler, TESTED),
    "_is_profiler_enabled": (lambda: torch.autograd.profiler, TESTED),
    "_scaled_dot_product_flash_attention_for_cpu": (lambda: torch.ops.aten, TESTED),
    "_grouped_mm": (lambda: torch.ops.aten, TESTED),
    "FakeTensorMode": (lambda: importlib.import_module("torch._subclasses"), TESTED),
    "SUPPORTED_NODES": (lambda: torch.utils._pytree, TESTED),
    "SUPPORTED_SERIALIZED_TYPES": (lambda: torch.utils._pytree, TESTED),
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


@pytest.mark.parametrize("name", NAMES)
def test_a_private_name_is_in_its_releases_only(name):
    find, releases = NAMES[name]
    if RELEASE in TESTED:
        assert hasattr(find(), name.split()[0]) == (RELEASE in releases)


#: Attributes of tensors, modules, named tuples and processes that are not private, or Python's.
USABLE = {
    *("_version", "_is_view", "_modules", "_parameters", "_buffers", "_metadata"),
    *(
        "_replace",
        "_fields",
        "_exit",
        "_inst",
        "_current_frames",
        "_DummyThread",
        "_register_atexit",
    ),
}


#: What each class of models in transformers sets for ``from_pretrained``, and procpipe.hf reads.
OF_TRANSFORMERS = {
    *("_can_record_outputs", "_keys_to_ignore_on_load_unexpected", "_init_weights"),
    "_from_config",
}


#: Which attention a configuration in transformers stands for.
OF_CONFIGURATIONS = {"_attn_implementation", "_experts_implementation"}


def test_models_of_transformers_have_the_names_that_are_used():
    transformers = pytest.importorskip("transformers")
    assert vars(transformers.PreTrainedModel).keys() >= OF_TRANSFORMERS
    assert vars(transformers.PreTrainedConfig).keys() >= OF_CONFIGURATIONS


def test_no_other_module_uses_private_names_of_torch():
    """Nor any attribute with an underscore that no class of procpipe has."""
    paths = [path for folder in ("procpipe", "launch") for path in (ROOT / folder).rglob("*.py")]
    trees = {path: tree_of(path) for path in paths}
    own = {name for tree in trees.values() for name in defined_in(tree)}
    of_transformers = OF_TRANSFORMERS | OF_CONFIGURATIONS
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path, tree in trees.items()
        if path.stem != "torch_internals"
        for line, name in private_names_in(tree, own)
        if not (path.parent.name in ("hf", "cutting") and name in of_transformers)
    ]

    assert found == []
    inside = private_names_in(trees[ROOT / "procpipe" / "torch_internals.py"], own)
    assert {"_Options", "_pytree", "_BatchNorm"} <= {name for _, name in inside}


def defined_in(tree: ast.Module) -> set[str]:
    found = set()
    for node in nodes_of(tree):
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


def private_names_in(tree: ast.Module, own: set[str]) -> list[tuple[int, str]]:
    found = []
    for node in nodes_of(tree):
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


def test_gradients_are_right_without_the_engines_function_or_under_an_unknown_torch(monkeypatch):
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(18, 1))
    expected = gradients_of(model)

    for name, value in (("_engine", None), ("IS_TESTED", False)):
        with monkeypatch.context() as patch:
            patch.setattr(torch_internals, name, value)
            assert all(map(torch.equal, gradients_of(model), expected))


def test_without_a_function_of_autograd_nothing_is_put_off(monkeypatch):
    layer = nn.Linear(2, 2)
    for name in ("stays", "are_functions_transformed"):
        monkeypatch.setattr(split, name, None, raising=False)
        layers = split.suited([layer])
        assert layers == ([layer] if name == "stays" else [])


def test_other_options_of_process_groups_are_one_clear_error():
    class Options:
        __slots__ = ("timeout",)

    class Group:
        _Options = Options

    message = re.escape(f"torch {torch.__version__} has other options for process groups")
    with pytest.raises(RuntimeError, match=message):
        torch_internals.gloo_options(Group, 1.0, None)
    with pytest.raises(RuntimeError, match=message):
        torch_internals.nccl_options(Group, 1.0, 4)


def test_no_batches_of_transfers_are_one_clear_error():
    class Group:
        class Options:
            config = SimpleNamespace()

            def __init__(self, is_high_priority_stream):
                pass

    with pytest.raises(RuntimeError, match=r"other options.*_start_coalescing"):
        torch_internals.nccl_options(Group, 1.0, 4)


def test_another_scaler_is_one_clear_error(monkeypatch):
    monkeypatch.delattr(torch.amp.GradScaler, "_unscale_grads_")
    with pytest.raises(RuntimeError, match="has another GradScaler than those known here"):
        torch_internals.check_gradients_by(torch.amp.GradScaler("cpu"), lambda check, zero: check())


def test_the_base_of_batch_normalisation():
    assert torch_internals.BatchNorm is nn.modules.batchnorm._BatchNorm
    assert inspect.signature(torch_internals.BatchNorm).parameters.keys() >= {"eps", "momentum"}


def test_an_error_without_values_is_raised_and_not_logged_too(caplog):
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(caplog.handler)
    try:
        with pytest.raises(RuntimeError, match="reduction dim"), torch_internals.without_values():
            nn.Linear(3, 4)(torch.ones(2, 7))
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.records == []
