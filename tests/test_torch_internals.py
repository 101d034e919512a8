"""Only one file uses private names of torch; what happens where torch lacks one."""

from __future__ import annotations

import ast
import inspect
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from procpipe import torch_internals
from procpipe.compute.split import splitter

ROOT = Path(__file__).parents[1]


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
        monkeypatch.setattr(splitter, name, None, raising=False)
        layers = splitter.suited([layer])
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
