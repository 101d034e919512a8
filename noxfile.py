"""Runs the tests under each supported release of torch and Python: ``make versions``.

Each has an environment of its own, ``.nox/torch-2-11-python-3-12`` and so on: about 5 GB, since the
package index has most releases of torch as CUDA builds only. It is made once and then kept.
"""

from __future__ import annotations

import re
from pathlib import Path

import nox

nox.needs_version = ">=2024.3"
nox.options.error_on_missing_interpreters = True
nox.options.reuse_venv = "yes"

#: Releases of torch, with the Pythons that the tests run on under each.
SUPPORTED = {
    "2.11.0": ("3.12",),
    "2.13.0": ("3.11", "3.12", "3.13"),
    "2.15.0": ("3.11", "3.13", "3.14"),
}

#: All tests, on all cores, as ``make test`` runs them.
AT_ONCE = ("-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder")

#: What constraints.txt says of these goes with the one torch there: each needs others.
NOT_CONSTRAINED = ("torch", "setuptools")


def run_tests(session: nox.Session, torch: str) -> None:
    """Install procpipe beside a release of torch, and run the tests: all, or what was asked for."""
    kept = Path(session.create_tmp(), "constraints.txt")
    lines = Path("constraints.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    kept.write_text("".join(line for line in lines if name_in(line) not in NOT_CONSTRAINED))
    session.install(
        "-c", str(kept), f"torch=={torch}", "-e", ".[examples,hf]", "--group", "test", silent=False
    )
    session.run(
        "python", "-m", "pytest", *(session.posargs or AT_ONCE), env={"OMP_NUM_THREADS": "1"}
    )


def name_in(line: str) -> str:
    """Return the package that a line of constraints.txt pins."""
    found = re.match(r"[\w.-]+", line)
    return found[0].lower() if found else ""


for _torch, _pythons in SUPPORTED.items():
    for _python in _pythons:
        _release = _torch.rpartition(".")[0]

        def _tests(session: nox.Session, torch: str = _torch) -> None:
            run_tests(session, torch)

        _tests.__doc__ = f"Run the tests under torch {_torch} and Python {_python}."
        nox.session(python=_python, name=f"torch-{_release}-python-{_python}")(_tests)
