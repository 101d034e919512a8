"""A stage is used in the thread that makes it, which need not be the main one."""

from __future__ import annotations

import pytest

from tests.dist.script import run_forked

SCRIPT = """
    import atexit, os, sys, threading, time
    import torch, torch.nn.functional as F
    from torch import nn
    from procpipe import Stage

    WHAT = sys.argv[1]

    def live():
        deadline_s = time.monotonic() + 60
        while not os.path.exists("rank 0 ends") and time.monotonic() < deadline_s:
            time.sleep(0.01)

    def train():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        stage = Stage(model, [1, 1], chunks=2, loss_fn=F.mse_loss)
        if stage.rank == 0:
            atexit.register(lambda: open("rank 0 ends", "w").close())
        for step in range(5):
            if WHAT == "calls elsewhere" and step == 2:
                thread = threading.Thread(target=stage.step, args=[torch.ones(6, 4)] * 2)
                thread.start()
                thread.join()
            if WHAT == "raises" and step == 2 and stage.rank == 1:
                raise ValueError("boom")
            if WHAT == "raises beside a thread" and step == 2 and stage.rank == 1:
                threading.Thread(target=live).start()
                raise ValueError("boom")
            stage.step(torch.ones(6, 4), torch.zeros(6, 4))
        print("trained", flush=True)
        stage.close()

    if WHAT in ("raises", "outlives the main thread"):
        thread = threading.Thread(target=train)
        thread.start()
        if WHAT == "raises":
            thread.join()
    else:
        train()
"""


@pytest.mark.parametrize("what", ["outlives the main thread", "calls elsewhere"])
def test_a_thread_trains(what):
    done = run_forked(SCRIPT, num_ranks=2, args=[what], tears_down=True).check()

    assert done.stdout.count("trained") == 2
    refused = "RuntimeError: step() is called in thread 'Thread-1 (step)', but the stage was made "
    assert done.stderr.count(refused) == (2 if what == "calls elsewhere" else 0)


@pytest.mark.parametrize(
    ("what", "story"),
    [
        ("raises", "rank 1 failed in thread 'Thread-1 (train)': ValueError: boom"),
        ("raises beside a thread", "rank 1 failed in the script: ValueError: boom"),
    ],
)
def test_the_thread_that_trains_fails(what, story):
    """The other rank ends at once, also while this process cannot, for another thread of it."""
    done = run_forked(SCRIPT, num_ranks=2, args=[what])

    assert f"procpipe: rank 0 ends, because {story}" in done.stderr
    assert done.stderr.count("Traceback") == 1
    assert done.duration_s < 40
    assert done.stdout == ""
