"""The rules for which part may import which, checked by reading every source file.

    launch  examples  benchmarks         public names; plan, planner and timeline
                 |
        stage.py  __init__.py            anything
                 |
        build.py                         anything; the optional only where a user selects it
                 |
    balance  planner  timeline  state    optional: nothing above loads them, see OPTIONAL; balance
    hf  replicas  sharded  cutting       uses planner; hf uses state and public names of procpipe
                 |
                run                      one step: plan, compute, channel, job, data
               /   \\
            job     data    model        the processes; mini-batches; layers of a stage
             |         \\    /
          channel   plan  compute        plan: the standard library and errors only
                            |
                          skip           what users write in layers
                 |
     errors  tree                        leaves: for all (the last for all but plan)
     torch_internals  torch_versions     leaves: likewise for all but plan
     forks  notes  processes             leaves: what processes share and report; what is in /proc
        optional  words                  leaves: what this installation lacks; lists in English

An import inside a function or under ``TYPE_CHECKING`` counts like any other.
"""

from __future__ import annotations

import ast
import graphlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.cases import for_each
from tests.sources import nodes_of, tree_of

ROOT = Path(__file__).parents[1]

#: Part of procpipe -> the parts that it may import besides itself.
MAY_IMPORT = {
    "errors": set(),
    "torch_versions": set(),
    "torch_internals": {"torch_versions"},
    "tree": {"errors", "torch_internals"},
    "forks": set(),
    "notes": set(),
    "processes": set(),
    "words": set(),
    "optional": set(),
    "plan": {"errors"},
    "skip": {"errors", "tree"},
    "channel": {"errors", "forks", "torch_internals", "tree"},
    "compute": {"skip", "errors", "notes", "torch_internals", "tree"},
    "model": {"compute", "plan", "errors", "words"},
    "job": {"channel", "errors", "forks", "notes", "optional", "processes", "words"},
    "run": {
        *("plan", "compute", "channel", "data", "job"),
        *("errors", "notes", "torch_internals", "tree", "words"),
    },
    "data": {"compute", "plan", "errors", "notes", "torch_internals", "tree"},
    "balance": {
        *("compute", "data", "job", "model", "planner", "run", "skip"),
        *("errors", "torch_internals", "tree"),
    },
    "planner": {"plan", "errors", "words"},
    "timeline": {"compute", "plan", "planner", "run", "notes", "torch_internals", "words"},
    "replicas": {
        *("channel", "compute", "data", "job", "plan", "run"),
        *("batchnorm", "forks", "torch_internals"),
    },
    "sharded": {"compute", "data", "errors", "model", "plan", "run", "torch_internals", "tree"},
    "state": {"job", "run", "stage", "errors", "notes", "version"},
    "cutting": {"skip", "torch_internals"},
    "hf": {"data", "losses", "skip", "stage", "state", "torch_internals"},
}

#: Loaded only where a user selects them; deleted in turn in tests/test_rooms.py.
OPTIONAL = tuple(
    f"procpipe.{name}"
    for name in (
        *("balance", "planner", "timeline", "replicas", "sharded", "state", "hf", "cutting"),
        "launch",
    )
)

#: Built on public names; the folders beside procpipe/, and the launcher.
USERS = ("procpipe.launch", "examples", "benchmarks")

#: The launcher's commands; none imports another one, and nothing else imports any.
COMMANDS = ("run", "doctor", "timeline", "plan")

#: Packages whose __all__ has the names for users.
PUBLIC = (
    "procpipe",
    "procpipe.skip",
    "procpipe.balance",
    "procpipe.planner",
    "procpipe.state",
    "procpipe.hf",
    "procpipe.cutting",
)

#: Packages whose modules benchmarks, examples and the launcher may import, too.
OPEN = ("procpipe.plan", "procpipe.planner", "procpipe.timeline")

#: What the launcher may import, too: none is for users.
FOR_LAUNCHER = (
    "procpipe.channel",
    "procpipe.errors",
    "procpipe.run",
    "procpipe.job",
    "procpipe.losses",
    "procpipe.optional",
    "procpipe.words",
    "procpipe.torch_internals",
    "procpipe.data.loss",
    "procpipe.model.cut",
    "procpipe.tree",
)

#: What benchmarks may import, too: where they choose the transport, and its thread blocks.
FOR_BENCHMARKS = ("procpipe.job.world", "procpipe.channel.nccl")

#: Modules that import only the standard library and each other.
PURE = (
    "procpipe.plan",
    "procpipe.errors",
    "procpipe.run.order",
    "procpipe.run.statistics",
    "procpipe.words",
    "procpipe.timeline.chrome",
    "procpipe.timeline.split",
    "procpipe.timeline.steps",
    "procpipe.timeline.text",
    "procpipe.timeline.usual",
    "procpipe.notes",
    "procpipe.planner",
)

#: Modules that may import torch.distributed; benchmarks compare with peers in it.
MAY_IMPORT_DISTRIBUTED = (
    "procpipe.channel.nccl",
    "procpipe.channel.store",
    "procpipe.job.start",
    "procpipe.job.world",
    "procpipe.state",
    "procpipe.replicas.gloo",
    "procpipe.replicas.group",
    "procpipe.launch.run.command",
    "procpipe.launch.run.launcher",
    "procpipe.launch.doctor.facts",
    "examples.tiny_pipeline",
    "benchmarks",
)


@dataclass(frozen=True)
class Import:
    """``import module`` (no name) or ``from module import name``."""

    module: str
    name: str | None
    line: int

    def __str__(self) -> str:
        return self.module if self.name is None else f"{self.module}.{self.name}"


def test_all_sources_keep_the_rules():
    assert faults_in(trees_of_sources()) == []


def test_the_sources_are_found():
    sources = paths_of_sources()

    assert {"procpipe.errors", "procpipe.tree", "procpipe.launch"} <= sources.keys()


def test_importing_procpipe_loads_nothing_optional():
    trees = trees_of_sources()
    loaded, new = set(), {"procpipe"}
    while new:
        loaded |= new
        new = (
            set().union(*(edges(module, at_load(trees[module]), trees) for module in new)) - loaded
        )

    assert "procpipe.stage" in loaded
    assert "procpipe.channel.shm" not in loaded  # imported in a function
    assert [module for module in loaded if within(module, OPTIONAL)] == []


def at_load(tree: ast.Module) -> ast.Module:
    """Return the imports of a module that run when it is imported."""
    imports: list[ast.stmt] = []
    nodes: list[ast.AST] = [*tree.body]
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imports.append(node)
        is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if not is_for_types and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            nodes += ast.iter_child_nodes(node)
    return ast.Module(imports, [])


BAD_EXAMPLES = {
    "plan imports torch": (
        {"procpipe.plan.task": "import torch"},
        "procpipe.plan.task:1 is pure and imports torch",
    ),
    "plan imports tree": (
        {"procpipe.plan.task": "from procpipe.tree import flatten", "procpipe.tree": ""},
        "procpipe.plan.task:1 imports procpipe.tree.flatten: plan may import only errors",
    ),
    "plan imports torch in a function": (
        {"procpipe.plan.task": "def f():\n    from torch import nn"},
        "procpipe.plan.task:2 is pure and imports torch.nn",
    ),
    "channel imports run": (
        {"procpipe.channel.base": "import procpipe.job.world", "procpipe.job.world": ""},
        "procpipe.channel.base:1 imports procpipe.job.world: channel may import only "
        "errors, forks, torch_internals, tree",
    ),
    "compute imports a top-level module": (
        {"procpipe.compute.partition": "from procpipe import stage", "procpipe.stage": ""},
        "procpipe.compute.partition:1 imports procpipe.stage: compute may import only "
        "errors, notes, skip, torch_internals, tree",
    ),
    "a package imports an optional one": (
        {"procpipe.channel.mesh": "from procpipe.balance import alone"},
        "procpipe.channel.mesh:1 imports procpipe.balance.alone: channel may import only "
        "errors, forks, torch_internals, tree",
    ),
    "a package imports public names": (
        {"procpipe": "__all__ = ['Stage']", "procpipe.channel.mesh": "from procpipe import Stage"},
        "procpipe.channel.mesh:1 imports procpipe.Stage: channel may import only "
        "errors, forks, torch_internals, tree",
    ),
    "an example imports a private module": (
        {"examples.train": "from procpipe.stage import Stage", "procpipe.stage": ""},
        "examples.train:1 imports procpipe.stage.Stage: "
        "use public names, procpipe.plan, planner and timeline",
    ),
    "the launcher imports a private name": (
        {"procpipe": "__all__ = ['Stage']", "procpipe.launch.main": "from procpipe import World"},
        "procpipe.launch.main:1 imports procpipe.World, which is not in procpipe.__all__",
    ),
    "a command of the launcher imports another one": (
        {"procpipe.launch.plan.trial": "from procpipe.launch.doctor import probe"},
        "procpipe.launch.plan.trial:1 imports procpipe.launch.doctor.probe, a command, which can "
        "be deleted",
    ),
    "torch.distributed in the wrong place": (
        {"procpipe.stage": "import torch.distributed as dist"},
        "procpipe.stage:1 imports torch.distributed",
    ),
    "torch.distributed from torch": (
        {"procpipe.run.control": "from torch import distributed"},
        "procpipe.run.control:1 imports torch.distributed",
    ),
    "torch.distributed by attribute": (
        {"procpipe.run.control": "import torch\nstore = torch.distributed.HashStore()"},
        "procpipe.run.control:2 imports torch.distributed",
    ),
    "a relative import": (
        {"procpipe.stage": "from . import tree", "procpipe.tree": ""},
        "procpipe.stage:1 has a relative import",
    ),
    "a circle": (
        {
            "procpipe.job.world": "from procpipe.job import stalls",
            "procpipe.job.stalls": "def f():\n    from procpipe.job.world import World",
        },
        "a circle: procpipe.job.stalls -> procpipe.job.world -> procpipe.job.stalls",
    ),
    "a circle through the root": (
        {"procpipe": "from procpipe.stage import Stage", "procpipe.stage": "import procpipe"},
        "a circle: procpipe -> procpipe.stage -> procpipe",
    ),
}


@for_each(("sources", "fault"), BAD_EXAMPLES.values(), ids=BAD_EXAMPLES)
def test_a_violation_is_reported(sources, fault):
    assert faults(sources) == [fault]


def test_allowed_imports_are_no_violations():
    good = {
        "procpipe": "from procpipe.stage import Stage\n__all__ = ['Stage']",
        "procpipe.errors": "from collections.abc import Sequence",
        "procpipe.tree": "import torch\nfrom procpipe.errors import BoundaryError",
        "procpipe.stage": "from procpipe.job.world import World\nfrom procpipe import tree",
        "procpipe.plan.task": "import json\nfrom procpipe.errors import PlanError",
        "procpipe.plan.schedules.gpipe": "from procpipe.plan import task",
        "procpipe.job.world": "import torch.distributed as dist\nimport procpipe.channel.mesh",
        "procpipe.launch.main": "from procpipe import Stage\nfrom procpipe.launch import hosts",
        "procpipe.launch.hosts": "from procpipe.plan.task import Task\nimport procpipe.job.board",
        "examples.train": "import torch\nimport procpipe\nfrom procpipe.plan import gpipe",
        "benchmarks.peer": "import torch.distributed.pipelining\nfrom procpipe import Stage",
    }

    assert faults(good) == []


def paths_of_sources() -> dict[str, Path]:
    """Return the file of every module that is checked, by its name when installed."""
    folders = {"procpipe": "procpipe", "launch": "procpipe.launch"}
    folders |= {"examples": "examples", "benchmarks": "benchmarks"}
    found = {}
    for folder, package in folders.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join((package, *parts))] = path
    return found


def trees_of_sources() -> dict[str, ast.Module]:
    return {module: tree_of(path) for module, path in paths_of_sources().items()}


def faults(sources: dict[str, str]) -> list[str]:
    return faults_in({module: ast.parse(source) for module, source in sources.items()})


def faults_in(trees: dict[str, ast.Module]) -> list[str]:
    """Return all violations, one sentence each."""
    public = {module: public_names(trees[module]) for module in PUBLIC if module in trees}
    found: list[str] = []
    for module, tree in trees.items():
        found.extend(f"{module}:{line} has a relative import" for line in relative_imports(tree))
        for an_import in imports_of(tree):
            fault = fault_of(module, an_import, public)
            if fault is not None:
                found.append(f"{module}:{an_import.line} {fault}")
        if not within(module, MAY_IMPORT_DISTRIBUTED):
            lines = uses_of_distributed(tree)
            found.extend(f"{module}:{line} imports torch.distributed" for line in lines)
    return found + circles(trees)


def fault_of(module: str, an_import: Import, public: dict[str, set[str]]) -> str | None:
    """Return what is wrong with one import, or ``None``."""
    target = str(an_import)
    if not within(target, ("procpipe",)):
        is_standard = target.partition(".")[0] in sys.stdlib_module_names
        return f"is pure and imports {target}" if within(module, PURE) and not is_standard else None
    if within(module, USERS):
        return fault_of_user(module, an_import, public)
    here, there = part_of(module), part_of(target)
    if here in MAY_IMPORT and there not in MAY_IMPORT[here] | {here}:
        allowed = ", ".join(sorted(MAY_IMPORT[here])) or "nothing"
        return f"imports {target}: {here} may import only {allowed}"
    if within(module, PURE) and not within(target, PURE):
        return f"is pure and imports {target}"
    return None


def fault_of_user(module: str, an_import: Import, public: dict[str, set[str]]) -> str | None:
    target = str(an_import)
    if within(target, ("procpipe.launch",)) and within(module, ("procpipe.launch",)):
        return fault_of_command(module, target)
    if target in PUBLIC or within(target, ("procpipe.launch", *OPEN)):
        return None
    if within(module, ("procpipe.launch",)) and within(target, FOR_LAUNCHER):
        return None
    if within(module, ("benchmarks",)) and within(target, FOR_BENCHMARKS):
        return None
    if an_import.module not in PUBLIC:
        return f"imports {target}: use public names, procpipe.plan, planner and timeline"
    if an_import.name not in public.get(an_import.module, ()):
        return f"imports {target}, which is not in {an_import.module}.__all__"
    return None


def fault_of_command(module: str, target: str) -> str | None:
    """Return what is wrong with an import within the launcher, whose commands can be deleted."""
    here, there = (name.split(".")[2:3] for name in (module, target))
    if there[0] in COMMANDS and here != there:
        return f"imports {target}, a command, which can be deleted"
    return None


def circles(trees: dict[str, ast.Module]) -> list[str]:
    """Return the first circle of imports, if there is any."""
    graph = {module: edges(module, tree, trees) for module, tree in trees.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        ring = error.args[1][:0:-1]
        start = ring.index(min(ring))
        ring = ring[start:] + ring[: start + 1]
        return ["a circle: " + " -> ".join(ring)]
    return []


def edges(module: str, tree: ast.Module, modules: dict[str, ast.Module]) -> set[str]:
    """Return the modules that ``module`` imports, and the packages these are in.

    Not the root package, which every import runs and which imports everything, unless it is
    imported by its name; nor the packages that ``module`` itself is in.
    """
    found: set[str] = set()
    for an_import in imports_of(tree):
        target = str(an_import) if str(an_import) in modules else an_import.module
        found.add(target)
        parts = target.split(".")
        packages = {".".join(parts[:k]) for k in range(2, len(parts))}
        found |= {package for package in packages if not within(module, (package,))}
    return (found & modules.keys()) - {module}


def imports_of(tree: ast.Module) -> Iterator[Import]:
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, None, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module is not None
            yield from (Import(node.module, alias.name, node.lineno) for alias in node.names)


def relative_imports(tree: ast.Module) -> list[int]:
    nodes = (node for node in nodes_of(tree) if isinstance(node, ast.ImportFrom))
    return [node.lineno for node in nodes if node.level > 0]


def uses_of_distributed(tree: ast.Module) -> list[int]:
    """Return the lines that import ``torch.distributed``, or reach it through ``torch``."""
    lines = {i.line for i in imports_of(tree) if within(str(i), ("torch.distributed",))}
    for node in nodes_of(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr="distributed"):
                lines.add(node.lineno)
    return sorted(lines)


def public_names(root: ast.Module) -> set[str]:
    """Return the names in a module's ``__all__``."""
    for node in root.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def part_of(module: str) -> str:
    """Return the part of procpipe: ``job`` for ``procpipe.job.world``."""
    return module.removeprefix("procpipe").removeprefix(".").partition(".")[0]


def within(module: str, packages: tuple[str, ...]) -> bool:
    """Return whether a module (or a name in one) is in one of the packages, or is one of them."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)
