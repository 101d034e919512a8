"""The job's key, if it comes from outside the job's store.

    PROCPIPE_KEY_FILE    names a file that the user made, with the same content on every host
    PROCPIPE_KEY         set by ``procpipe run`` for the processes that it starts on one host

Without either, rank 0 makes a key and puts it into the store, where any client of the store's
port can read it.
"""

from __future__ import annotations

import hashlib
import os
import stat

KEY_FILE_VARIABLE = "PROCPIPE_KEY_FILE"
KEY_VARIABLE = "PROCPIPE_KEY"

#: 128 bits, if each character is a random hexadecimal digit; more if it is a better one.
_MIN_BYTES = 32
_MAX_BYTES = 1 << 16

_ADVICE = "make one with: (umask 077; head -c 32 /dev/urandom | base64 > FILE)"


def given_key() -> bytes | None:
    """Return the key that this process was given, 32 bytes; None if it was given none.

    Raises:
        ValueError: the file cannot be read, is not a regular file, belongs to a user other than
            this process's or the superuser, can be read or written by others, or is too short.
    """
    path = os.environ.get(KEY_FILE_VARIABLE, "")
    if path:
        return hashlib.sha256(_content(path)).digest()
    text = os.environ.get(KEY_VARIABLE, "")
    return hashlib.sha256(text.encode()).digest() if text else None


def _content(path: str) -> bytes:
    """Return the file's content without surrounding white space."""
    named = f"{KEY_FILE_VARIABLE}={path}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ValueError(f"{named} cannot be read ({error.strerror}): {_ADVICE}") from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{named} is not a regular file: {_ADVICE}")
        if found.st_uid not in (0, os.geteuid()):
            raise ValueError(
                f"{named} belongs to user {found.st_uid}, who could change it, and not to user "
                f"{os.geteuid()} or 0: {_ADVICE}"
            )
        if found.st_mode & 0o077:
            raise ValueError(
                f"{named} has mode {stat.S_IMODE(found.st_mode):03o}, so that other users could "
                f"read it: chmod 600 {path}, or {_ADVICE}"
            )
        content = os.read(descriptor, _MAX_BYTES).strip()
    finally:
        os.close(descriptor)
    if len(content) < _MIN_BYTES:
        raise ValueError(
            f"{named} holds {len(content)} bytes, but a key has at least {_MIN_BYTES}: {_ADVICE}"
        )
    return content
