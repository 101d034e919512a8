"""The project's modules as syntax trees, for tests of rules on the source.

Each is read, parsed and walked once, for all tests of a process.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes_of(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Return all nodes of a tree, in the order of ``ast.walk``."""
    return tuple(ast.walk(tree))
