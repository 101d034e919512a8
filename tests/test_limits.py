"""The number of files that may be open: raised, and an error where it is too low."""

from __future__ import annotations

import errno
import os
import resource
import warnings

import pytest

from procpipe import limits
from procpipe.errors import FileLimitError


@pytest.mark.dist
def test_the_limit_is_raised_to_what_is_allowed():
    with warnings.catch_warnings():  # newer versions of Python warn of threads
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:  # which cannot raise its hard limit again
        found = None
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
            limits.raise_file_limit()
            found = resource.getrlimit(resource.RLIMIT_NOFILE)
        finally:
            os._exit(found != (200, 200))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_number_below_the_limit_is_no_error():
    limits.check_file_limit(1, "a socket")
    with limits.naming_file_limit("a socket"):
        pass


def test_the_error_of_a_number_above_the_limit_has_both_numbers():
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir("/proc/self/fd")) - 1

    with pytest.raises(FileLimitError) as caught:
        limits.check_file_limit(limit, "the connections")

    message = str(caught.value)
    assert f"has {num_open} files open and may open {limit} (ulimit -n" in message
    assert f"needs {limit} more for the connections" in message
    assert f"a limit of {num_open + limit} or more" in message


@pytest.mark.parametrize(
    ("number", "words"), [(errno.EMFILE, "ulimit -n"), (errno.ENFILE, "fs.file-max")]
)
def test_an_error_of_the_system_names_its_limit_and_what_needs_the_file(number, words):
    with pytest.raises(FileLimitError, match=words) as caught, limits.naming_file_limit("a pipe"):
        raise OSError(number, "Too many open files")
    assert "1 more" in str(caught.value)
    assert "for a pipe" in str(caught.value)


def test_other_errors_are_unchanged():
    with pytest.raises(FileNotFoundError), limits.naming_file_limit("a pipe"):
        raise FileNotFoundError(errno.ENOENT, "gone")
    error = FileLimitError("raised before")
    with pytest.raises(FileLimitError, match="raised before"), limits.naming_file_limit("a pipe"):
        raise error
