"""The limit on open files: raising it, and errors that say how many are needed.

Sockets, shared memory and files opened through ``/proc`` all count. A leaf: every part may use it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

from procpipe.errors import FileLimitError


def raise_file_limit() -> None:
    """Let this process, and its children, open as many files as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may refuse it
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_file_limit(num_wanted: int, what: str) -> None:
    """Raise ``FileLimitError`` unless this process may open so many more files for ``what``."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    with naming_file_limit(what, num_wanted):
        num_open = len(os.listdir("/proc/self/fd")) - 1  # one is open only for the listing
    if limit != resource.RLIM_INFINITY and num_open + num_wanted > limit:
        raise _limit_error(what, num_open, num_wanted)


@contextlib.contextmanager
def naming_file_limit(what: str, num_wanted: int = 1) -> Iterator[None]:
    """Replace "Too many open files" by an error that says how many are needed, and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EMFILE:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            raise _limit_error(what, limit, num_wanted) from None
        if error.errno == errno.ENFILE:
            raise FileLimitError(
                f"this host has as many files open as its system allows, and {num_wanted} more are "
                f"needed for {what}: end other processes, or raise fs.file-max (sysctl)"
            ) from None
        raise


def _limit_error(what: str, num_open: int, num_wanted: int) -> FileLimitError:
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_open + num_wanted
    is_hard = "" if hard == limit else f", hard limit {hard}"
    return FileLimitError(
        f"this process has {num_open} files open and may open {limit} (ulimit -n{is_hard}), but "
        f"needs {num_wanted} more for {what}: start it with a limit of {needed} or more (ulimit "
        f"-n {max(needed, 2 * limit)}; LimitNOFILE in a service, --ulimit nofile in a container), "
        "or close files that the script keeps open"
    )
