"""An emulated GPU: PyTorch's CUDA build runs on a machine that has none. README.md says how.

``build()`` compiles it, ``environment()`` returns the variables for a process that shall use it.
Imports no torch: what runs on emulated GPUs is another process.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Libraries", "build", "environment"]

_SOURCES = Path(__file__).parent
_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall")


@dataclass(frozen=True)
class Libraries:
    """What ``build`` made.

    Attributes:
        driver: libcuda.so.1, to be loaded before all others.
        kernels: libkernels.so, which it opens; None if there is no kernels.cpp.
    """

    driver: Path
    kernels: Path | None


def build(folder: Path | None = None) -> Libraries:
    """Compile what has changed, with g++; the first time about a minute.

    Processes may call this at the same time: one compiles, the others wait for it.

    Args:
        folder: where the libraries go; by default emulated_gpu/ in this Python's environment.

    Raises:
        RuntimeError: g++ or a CUDA build of torch is missing, or the sources do not compile.
    """
    if shutil.which("g++") is None:
        raise RuntimeError(
            "the emulated GPU is compiled with g++, which is not installed (Debian's package: g++)"
        )
    folder = Path(sys.prefix) / "emulated_gpu" if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    packages = _site_packages()
    driver_flags = (*_FLAGS, *_includes(packages))
    kernels_flags = (*_FLAGS, *_includes(packages), *_torch_flags(packages))
    with _locked(folder / "lock"):
        sources = sorted(_SOURCES.glob("*.cpp"))
        flags = {s: kernels_flags if s.name == "kernels.cpp" else driver_flags for s in sources}
        with ThreadPoolExecutor(2) as pool:
            compiled = list(pool.map(lambda s: _compile(s, flags[s], folder), sources))
        objects = {source.name: path for source, path in zip(sources, compiled, strict=True)}
        kernels_object = objects.pop("kernels.cpp", None)
        driver = _link(list(objects.values()), folder, "libcuda.so.1", ["-ldl"])
        kernels = None
        if kernels_object is not None:
            torch = packages / "torch" / "lib"
            libraries = ["-ltorch", "-ltorch_cpu", "-ltorch_cuda", "-lc10", "-lc10_cuda"]
            options = [f"-L{torch}", *libraries, "-Wl,--no-as-needed"]
            kernels = _link([kernels_object], folder, "libkernels.so", [*options, str(driver)])
    return Libraries(driver, kernels)


def environment(
    gpus: int = 2,
    seed: int = 0,
    *,
    libraries: Libraries | None = None,
    folder: str | Path | None = None,
    **settings: int | str,
) -> dict[str, str]:
    """Return the variables with which a new process has emulated GPUs.

    Args:
        gpus: how many.
        seed: of the delays and of the choice of starved streams.
        libraries: what ``build`` made; by default it is called.
        folder: where processes that share these GPUs find one another: each run's own.
        settings: others, as in README.md: ``delay_us=300`` is EMULATED_GPU_DELAY_US.
    """
    libraries = build() if libraries is None else libraries
    variables = {
        # By its name, which is found below the next variable: a space ends a path here, not there.
        "LD_PRELOAD": _before(libraries.driver.name, "LD_PRELOAD"),
        "LD_LIBRARY_PATH": _before(str(libraries.driver.parent), "LD_LIBRARY_PATH"),
        "EMULATED_GPU_COUNT": str(gpus),
        "EMULATED_GPU_SEED": str(seed),
        # Else the last digits of MKL's products depend on where their factors are in memory.
        "MKL_CBWR": os.environ.get("MKL_CBWR", "COMPATIBLE"),
    }
    if libraries.kernels is not None:
        variables["EMULATED_GPU_KERNELS"] = str(libraries.kernels)
    if folder is not None:
        variables["EMULATED_GPU_FOLDER"] = str(folder)
    return variables | {f"EMULATED_GPU_{k.upper()}": str(value) for k, value in settings.items()}


def _before(entry: str, variable: str) -> str:
    """Return a list of paths, with another one in front of those that the variable has."""
    return ":".join([entry, *filter(None, [os.environ.get(variable)])])


def _site_packages() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError(f"{sys.executable} has no torch, whose headers the emulated GPU needs")
    packages = Path(spec.origin).parents[1]
    if not any(packages.glob("nvidia/cu*/include/cuda_runtime_api.h")):
        raise RuntimeError(
            f"the torch of {sys.executable} is no CUDA build with headers of CUDA 13 beside it; "
            "install torch from the package index, without an index of CPU builds"
        )
    return packages


def _includes(packages: Path) -> list[str]:
    folders = [*packages.glob("nvidia/cu*/include"), packages / "nvidia" / "nccl" / "include"]
    return [f"-I{_SOURCES}", *(f"-isystem{folder}" for folder in folders)]


def _torch_flags(packages: Path) -> list[str]:
    """Return what kernels.cpp needs besides: torch's headers, its C++ standard and its ABI."""
    include = packages / "torch" / "include"
    return [
        "-std=c++20",
        "-D_GLIBCXX_USE_CXX11_ABI=1",
        f"-isystem{include}",
        f"-isystem{include / 'torch' / 'csrc' / 'api' / 'include'}",
    ]


def _compile(source: Path, flags: Sequence[str], folder: Path) -> Path:
    key = hashlib.sha256()
    for text in (source, *sorted(_SOURCES.rglob("*.h"))):
        key.update(text.read_bytes())
    # Without the folder of the sources: another copy of them uses what is compiled already.
    key.update("\0".join(flag for flag in flags if flag != f"-I{_SOURCES}").encode())
    key.update(importlib.metadata.version("torch").encode())
    made = folder / f"{source.stem}-{key.hexdigest()[:16]}.o"
    if not made.exists():
        unfinished = made.with_suffix(".new")
        _run(["g++", *flags, "-c", str(source), "-o", str(unfinished)])
        unfinished.rename(made)
    return made


def _link(objects: Sequence[Path], folder: Path, name: str, options: Sequence[str]) -> Path:
    """Link a library in a folder of its own, since some are found by name only."""
    key = hashlib.sha256("".join([*map(str, objects), *options]).encode()).hexdigest()[:16]
    made = folder / key / name
    if not made.exists():
        made.parent.mkdir(exist_ok=True)
        unfinished = made.with_suffix(".new")
        shared = ["g++", "-shared", f"-Wl,-soname,{name}", "-pthread"]
        _run([*shared, *map(str, objects), *options, "-o", str(unfinished)])
        unfinished.rename(made)
    return made


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
