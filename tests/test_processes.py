"""What ``/proc`` says of processes."""

from __future__ import annotations

import os
import resource
import subprocess

from procpipe.processes import has_ended, start_ticks_of


def test_a_process_has_ended_before_and_after_it_is_reaped():
    child = subprocess.Popen(["sleep", "1000"])
    started = start_ticks_of(child.pid)
    assert not has_ended(child.pid, started)

    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(child.pid, started)
    child.wait()
    assert has_ended(child.pid, started)


def test_a_process_of_the_same_number_is_another():
    assert has_ended(os.getpid(), start_ticks_of(os.getpid()) - 1)


def test_a_process_that_cannot_be_read_is_taken_to_live():
    started = start_ticks_of("self")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))  # no file more can be opened
    try:
        assert not has_ended(os.getpid(), started + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
