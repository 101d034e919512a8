"""What ``/proc`` says of processes and of the running system. A leaf: every part may read."""

from __future__ import annotations


def boot_id() -> str:
    """Return a text that is new for each boot of the host; ``OSError`` where there is none."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def start_ticks_of(pid: int | str) -> int:
    """Return when a process was started, in clock ticks since boot; pids are reused, it is not."""
    return int(_status_fields(pid)[19])


def has_ended(pid: int, start_ticks: int) -> bool:
    """Return whether the process that was started then has ended, if only as a zombie."""
    try:
        fields = _status_fields(pid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:  # it is not known: too many open files, for instance
        return False
    return fields[0] in (b"Z", b"X") or int(fields[19]) != start_ticks


def _status_fields(pid: int | str) -> list[bytes]:
    """Return ``/proc/<pid>/stat`` from the third field on: the second may hold any text."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()
