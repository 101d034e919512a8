"""One job on several hosts: TCP between them, strangers ignored, hosts that are lost and return."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.dist.jobs import Job
from tests.dist.script import free_port
from tests.launch.started import RUN

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]  # many processes, on a busy machine

#: Functions for the scripts of all tests; ``report`` prints values for the test as JSON.
TRAIN = """
import json, os, signal, socket, sys, time
import psutil, torch, torch.nn.functional as F
from torch import nn
import procpipe.job.start as starting
from procpipe import Stage

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def report(**words):
    found = {"rank": RANK, "size": SIZE, "place": os.environ["PLACE"], **words}
    os.write(1, (json.dumps(found) + "\\n").encode())

def model():
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Linear(8, 8, dtype=torch.float64) for _ in range(3)])

torch.manual_seed(0)
x = torch.randn(1 << 13, 8, dtype=torch.float64)  # 128 KiB a micro-batch: in pieces

def build(balance, **options):
    return Stage(model(), balance, chunks=4, loss_fn=F.mse_loss, **options)

def links(stage):
    mesh = stage._world.mesh
    return {peer: mesh._data[peer].sock.family.name for peer in mesh.peers}

def train(stage, steps):
    losses = []
    for _ in range(steps):
        losses.append(stage.step(x, x).item())
        with torch.no_grad():  # what SGD does, but for the second that its import takes
            for parameter in stage.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
    return losses
"""


def plain_losses(steps):
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Linear(8, 8, dtype=torch.float64) for _ in range(3)])
    torch.manual_seed(0)
    x = torch.randn(1 << 13, 8, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


#: Addresses of this machine, between which ranks use TCP.
HOSTS = ("127.0.0.2", "127.0.0.3")


def start(job, port, place, num_ranks, options, conf="", attempts=1):
    """Start ``procpipe run`` on a host, at most so many times; the meeting point is the first."""
    address = HOSTS[place != "first"]
    words = [*RUN, "-n", num_ranks, "--local-addr", address, *options]
    words += ["--rdzv-endpoint", f"{HOSTS[0]}:{port}"]
    words += ["--rdzv-conf", f"is_host={int(place == 'first')},{conf}", "train.py"]
    return job.start(words, address, num_ranks=num_ranks * attempts, PLACE=place)


def reports(job, **expected):
    """Return the reports of all ranks with these values, by place and time."""
    logs = sorted(job.path.glob("procpipe-logs/*/attempt_*/rank_*/stdout.log"))
    lines = [line for log in logs for line in log.read_text().splitlines()]
    found = [json.loads(line) for line in lines if line.startswith('{"rank"')]
    return [each for each in found if expected.items() <= each.items()]


# -- one job -------------------------------------------------------------------------------------

#: A stranger connects to each rank that waits for this rank, and later to what listens.
MEET_STRANGERS = """
connect_to, listen, sockets = starting.Start._connect, starting.Start._listen, set()
NOISE = (
    b"", b"GET / HTTP/1.1\\r\\n\\r\\n" + bytes(64), b"procpipe3" + bytes(100), os.urandom(9999)
)

def disturb(address):
    for words in NOISE:
        with socket.create_connection(address) as stranger:
            stranger.sendall(words)

def disturb_and_connect_to(start, peer, kind):
    if (peer, kind) not in start._links:
        start._address_of(peer)  # it has one
        _, _, *address, _ = starting.json.loads(start._store.get(start._entry_name(peer)))
        disturb(tuple(address))
    return connect_to(start, peer, kind)

def note_and_listen(start):
    listen(start)
    ours = [sock for sock in start._listeners if sock.family != socket.AF_UNIX]
    sockets.update(sock.getsockname()[0] for sock in ours)

starting.Start._connect, starting.Start._listen = disturb_and_connect_to, note_and_listen
stage = build([1, 1, 1])
first = train(stage, 1)
mine = psutil.Process().net_connections("inet")
ports = [tuple(sock.laddr) for sock in mine if sock.status == psutil.CONN_LISTEN]
for port in ports:
    disturb(port)
report(losses=first + train(stage, 2), listened=sorted(sockets), listens=[ip for ip, _ in ports],
     links=links(stage), pid=os.getpid())
while True:
    train(stage, 1)
"""


def test_hosts_of_different_sizes_train_as_one_process_until_a_rank_is_killed():
    port = free_port()
    with Job() as job:
        job.write("train.py", TRAIN + MEET_STRANGERS)
        first = start(job, port, "first", 1, ["--nnodes", 2])
        second = start(job, port, "second", 2, ["--nnodes", 2])
        first.wait_until(lambda: len(reports(job)) == 3)
        ranks = {report["rank"]: report for report in reports(job)}
        (victim,) = reports(job, place="first")
        os.kill(victim["pid"], signal.SIGKILL)

        assert first.wait_end() == 128 + signal.SIGKILL, first.output
        assert second.wait_end() == 1, second.output
        assert sorted(ranks) == [0, 1, 2]
        assert len(reports(job, place="second")) == 2
        for rank, report in ranks.items():
            assert report["losses"] == pytest.approx(plain_losses(3), abs=1e-12)
            address = HOSTS[report["place"] == "second"]
            assert report["listened"] == [address]  # the sockets between ranks
            assert set(report["listens"]) - ({"::"} if rank == 0 else set()) <= {address}  # a store
            assert report["links"] == {
                str(peer): "AF_UNIX" if other["place"] == report["place"] else "AF_INET"
                for peer, other in ranks.items()
                if peer != rank
            }
        name = f"stage {victim['rank']} (rank {victim['rank']})"
        assert f"procpipe: {name} was killed by SIGKILL" in first.output
        line = f"^procpipe: rank {victim['rank']} ended without a message.*on another host, whose"
        assert re.search(line, second.output, re.M), second.output
        assert "or its host or network failed" in second.output
        assert not job.survivors()


# -- hosts that are lost and return --------------------------------------------------------------

#: Rank 0's loader, and so every rank's, ends when the test writes the file.
ELASTIC = """
def until_stopped():
    while not os.path.exists("stop"):
        yield x, x

stage = build([3] if SIZE == 1 else [1, 2], timeout_s=60)
for step, (input, target) in enumerate(stage.batches(until_stopped())):
    loss = stage.step(input, target).item()
    if step == 0:
        report(loss=loss, attempt=os.environ["TORCHELASTIC_RESTART_COUNT"], links=links(stage))
"""

#: A host counts as lost after four silent seconds; a late one is waited for one second.
SOON = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=4"


def test_training_continues_without_a_lost_host_and_with_it_after_its_return():
    """The returned host counts its restarts from 0 again; the other host counts from 1."""
    port = free_port()
    options = ["--nnodes", "1:2", "--max-restarts", 3, "--rdzv-id", "elastic"]
    with Job() as job:
        job.write("train.py", TRAIN + ELASTIC)
        first = start(job, port, "first", 1, options, SOON, attempts=3)
        lost = start(job, port, "second", 1, options, SOON)
        first.wait_until(lambda: len(reports(job, size=2)) == 2)
        lost.kill_all()
        first.wait_until(lambda: reports(job, size=1))
        back = start(job, port, "back", 1, options, SOON)
        first.wait_until(lambda: len(reports(job, size=2)) == 4)
        job.write("stop", "")

        assert first.wait_end() == 0, first.output
        assert back.wait_end() == 0, back.output
        for report in reports(job):
            assert report["loss"] == pytest.approx(plain_losses(1)[0], abs=1e-12)
        (returned,) = reports(job, place="back", size=2, attempt="0")
        assert {*returned["links"].values()} == {"AF_INET"}
        assert [r["attempt"] for r in reports(job, place="first", size=2)] == ["0", "1"]
        assert "restart 1 of 3, with 1 ranks, because rank " in first.output
        assert "restart 1 of 3, with 2 ranks, because the set of hosts has changed" in first.output
        assert not job.survivors()
