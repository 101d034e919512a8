"""Makes a fork like a new interpreter, which runs a main module; see tests/dist/forks.py.

become     its session, files, folder, environment and main module
End.run    runs that, and ends the process
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import os
import sys
import termios
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.dist.forks import Start


def become(start: Start, descriptors: list[int]) -> tuple[types.CodeType, dict[str, Any]]:
    """Set this child up like a new interpreter; return its main code and its globals."""
    lead_session(descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    os.chdir(start.cwd)
    os.environ.clear()
    os.environ.update(start.env)
    _open_standard_files()
    if "PYTHONFAULTHANDLER" in start.env:
        faulthandler.enable()
    main = types.ModuleType("__main__")
    if start.argv[0] in ("-c", "-m"):
        sys.argv = ["-c", *start.argv[2:]]
        sys.path[0] = ""
        text = start.argv[1]
        if start.argv[0] == "-m":
            text = f"import runpy; runpy.run_module({text!r}, run_name='__main__', alter_sys=True)"
        code = compile(text, "<string>", "exec")
    else:
        sys.argv = [*start.argv]
        sys.path[0] = str(Path(start.argv[0]).parent)
        main.__file__ = start.argv[0]
        code = compile(Path(start.argv[0]).read_bytes(), start.argv[0], "exec")
    sys.modules["__main__"] = main
    return code, vars(main)


def lead_session(descriptors: list[int]) -> None:
    """Lead a session, on the terminal if there is one, with these standard files."""
    if os.getsid(0) != os.getpid():  # the rank of a launcher leads a session already
        os.setsid()
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
    if os.isatty(1):
        fcntl.ioctl(1, termios.TIOCSCTTY, 0)


def _open_standard_files() -> None:
    """Open what ``sys`` has anew: as the server opened it, it remembers other files.

    With PYTHONUNBUFFERED, Python writes a line's end apart from the line, so that lines of several
    ranks in one file may mix. Here each line is one write.
    """
    by_line = os.isatty(1) or bool(os.environ.get("PYTHONUNBUFFERED"))
    streams = {
        "stdin": os.fdopen(0, closefd=False),
        "stdout": os.fdopen(1, "w", 1 if by_line else -1, closefd=False),
        "stderr": os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False),
    }
    for name, stream in streams.items():
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


class End:
    """The last exit function of a child: ends the process before the modules are freed."""

    def __init__(self) -> None:
        self._code: int | None = None
        # Exit functions run in reverse order.
        atexit.register(self._end_now)

    def run(self, code: types.CodeType, names: dict[str, Any], *, tears_down: bool) -> None:
        """Run a main module, and store the exit code of its process."""
        try:
            exec(code, names)
            ending = 0
        except SystemExit as end:
            ending = end.code if isinstance(end.code, int) else int(end.code is not None)
            raise
        except KeyboardInterrupt:
            tears_down = True  # Python then ends by that signal
            raise
        except BaseException:
            ending = 1
            raise
        finally:
            self._code = None if tears_down else ending

    def _end_now(self) -> None:
        if self._code is not None:
            for file in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    file.flush()
            os._exit(self._code & 0xFF)
