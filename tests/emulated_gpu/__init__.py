"""An emulated GPU: PyTorch's CUDA build runs on a machine without a GPU. See README.md.

``build()`` compiles it, ``environment()`` returns the variables for a process that uses it. This
module does not import torch: other processes run on emulated GPUs.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_SOURCES = Path(__file__).parent
_FLAGS = ("-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-Wall", f"-I{_SOURCES}")
_KERNELS = _SOURCES / "kernels.cpp"


def build(folder: Path | None = None) -> Path:
    """Compile with g++ if the sources have changed; takes about a minute.

    Processes may call this at the same time: one compiles, the others wait for it.

    Args:
        folder: where the libraries go; by default emulated_gpu/ in this Python's environment.

    Returns:
        The library that must be loaded before all others, libcuda.so.1.

    Raises:
        RuntimeError: g++ or a CUDA build of torch is missing, or the sources do not compile.
    """
    if shutil.which("g++") is None:
        raise RuntimeError(
            "the emulated GPU is compiled with g++, which is not installed (Debian's package: g++)"
        )
    packages = _site_packages()
    torch = packages / "torch"
    includes = [*packages.glob("nvidia/*/include"), torch / "include"]
    includes.append(torch / "include/torch/csrc/api/include")
    flags = [*_FLAGS, *(f"-isystem{include}" for include in includes)]
    links = [f"-L{torch / 'lib'}", "-ltorch", "-ltorch_cpu", "-ltorch_cuda", "-lc10", "-lc10_cuda"]
    driver = [str(path) for path in sorted(_SOURCES.glob("*.cpp")) if path != _KERNELS]
    commands = {
        "libcuda.so.1": ["-std=c++17", *flags, *driver, "-Wl,-soname,libcuda.so.1"],
        "libkernels.so": ["-std=c++20", *flags, str(_KERNELS), *links],
    }
    folder = Path(sys.prefix) / "emulated_gpu" if folder is None else folder
    made = folder / _digest(torch / "version.py", *sorted(_SOURCES.rglob("*")))
    made.mkdir(parents=True, exist_ok=True)
    with open(made / "lock", "w") as lock, ThreadPoolExecutor() as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        list(pool.map(lambda name: _compile(made / name, commands[name]), commands))
    return made / "libcuda.so.1"


def environment(
    gpus: int = 2,
    seed: int = 0,
    *,
    library: Path | None = None,
    folder: str | Path | None = None,
    **settings: int | str,
) -> dict[str, str]:
    """Return the environment variables that give a new process emulated GPUs.

    Args:
        gpus: how many.
        seed: of the delays and of the choice of starved streams.
        library: the result of ``build``, which is called by default.
        folder: for files of the processes that share these GPUs; give each run its own.
        settings: others, as in README.md: ``delay_us=300`` is EMULATED_GPU_DELAY_US.
    """
    library = build() if library is None else library
    settings |= {"count": gpus, "seed": seed}
    if folder is not None:
        settings["folder"] = str(folder)
    return {
        # By name, found by LD_LIBRARY_PATH: LD_PRELOAD cannot have a path with a space.
        "LD_PRELOAD": _before(library.name, "LD_PRELOAD"),
        "LD_LIBRARY_PATH": _before(str(library.parent), "LD_LIBRARY_PATH"),
        # Otherwise the last digits of MKL's products depend on the addresses of their factors.
        "MKL_CBWR": os.environ.get("MKL_CBWR", "COMPATIBLE"),
        **{f"EMULATED_GPU_{name.upper()}": str(value) for name, value in settings.items()},
    }


def _before(entry: str, variable: str) -> str:
    """Return the paths of a variable, with another one in front."""
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


def _digest(*paths: Path) -> str:
    """Return a name that depends only on the contents of files."""
    texts = [path.read_bytes() for path in paths if path.is_file() and path.suffix != ".pyc"]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


def _compile(library: Path, options: list[str]) -> None:
    if library.exists():
        return
    unfinished = library.with_suffix(".new")
    command = ["g++", *options, "-o", str(unfinished)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    unfinished.rename(library)
