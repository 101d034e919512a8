"""What is installed: every package, the launcher under its name, and the marker of typed code."""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_listed():
    found = set()
    for folder, name in {"procpipe": "procpipe", "launch": "procpipe.launch"}.items():
        for path in (ROOT / folder).rglob("*.py"):
            found.add(".".join((name, *path.parent.relative_to(ROOT / folder).parts)))

    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found


def test_the_marker_of_typed_code_is_shipped():
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["procpipe"]
    assert (ROOT / "procpipe" / "py.typed").exists()


def test_everything_a_developer_installs_is_pinned():
    pinned = set()
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            assert version, f"constraints.txt: {line!r} pins no version"
            pinned.add(name.lower().replace("_", "-"))
    extras = PROJECT["project"]["optional-dependencies"].values()
    groups = itertools.chain(*PROJECT["dependency-groups"].values())
    in_groups = [requirement for requirement in groups if isinstance(requirement, str)]
    required = [*PROJECT["project"]["dependencies"], *itertools.chain(*extras), *in_groups]
    names = {name_of(requirement) for requirement in required} - {"procpipe"}

    assert names <= pinned


def name_of(requirement: str) -> str:
    return requirement.partition("[")[0].partition(">")[0].partition("=")[0].strip()
