"""One job on several hosts: TCP between them, strangers ignored, hosts that are lost and return."""

from __future__ import annotations

import json
import os
import re
import signal
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.launch.started import TORCHRUN, Job, free_port, loopback_addresses, two_hosts

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
    os.write(1, (json.dumps({"rank": RANK, "size": SIZE, **words}) + "\\n").encode())

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


def torchrun(hosts, number, nproc=1, nnodes="2", port=29400, conf="", **options):
    """Return torchrun's arguments on one host; the first has the meeting point."""
    conf = f"is_host={int(number == 0)}{conf and ','}{conf}"
    extra = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return [
        *TORCHRUN,
        f"--nnodes={nnodes}",
        f"--nproc-per-node={nproc}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={hosts[0].address}:{port}",
        "--rdzv-id=test",
        f"--rdzv-conf={conf}",
        f"--local-addr={hosts[number].address}",
        *extra,
        "train.py",
    ]


def reports(*processes):
    """Return the ranks' reports, in the order of each host's output."""
    lines = [line for process in processes for line in process.output.splitlines()]
    return [json.loads(line) for line in lines if line.startswith('{"rank"')]


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


def start_two(hosts, job, script, nproc=(1, 2), attempts=(1, 1), port=29400, **options):
    """Start torchrun on two hosts; ``attempts``: how often each starts its ranks."""
    job.write("train.py", TRAIN + script)
    return [
        job.start(
            torchrun(hosts, number, nproc=nproc[number], port=port, **options),
            host,
            num_ranks=nproc[number] * attempts[number],
        )
        for number, host in enumerate(hosts)
    ]


def test_hosts_of_different_sizes_train_as_one_process_until_a_rank_is_killed():
    with two_hosts() as hosts, Job() as job:
        agents = start_two(hosts, job, MEET_STRANGERS, port=free_port())
        agents[0].wait_until(lambda: len(reports(*agents)) == 3)
        ranks = {report["rank"]: report for report in reports(*agents)}
        host_of = {report["rank"]: host for host in (0, 1) for report in reports(agents[host])}
        (victim,) = reports(agents[0])
        killed_s = time.monotonic()
        os.kill(victim["pid"], signal.SIGKILL)

        assert [agent.wait_end() for agent in agents] == [1, 1]
        assert time.monotonic() - killed_s < 30.0
        assert sorted(ranks) == [0, 1, 2]
        assert sorted(host_of.values()) == [0, 1, 1]
        for rank, report in ranks.items():
            assert report["losses"] == pytest.approx(plain_losses(3), abs=1e-12)
            address = hosts[host_of[rank]].address
            assert report["listened"] == [address]  # the sockets between ranks
            assert set(report["listens"]) <= {address}
            assert report["links"] == {
                str(peer): "AF_UNIX" if host_of[peer] == host_of[rank] else "AF_INET"
                for peer in ranks
                if peer != rank
            }
        expected = rf"rank \d ends, because rank {victim['rank']} ended without a message"
        assert len(re.findall(expected, agents[1].output)) == 2, agents[1].output
        assert "or its host or network failed" in agents[1].output
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
report(ended=True)
"""

#: A host counts as lost after six silent seconds; a late one is waited for one second.
SOON = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=6"


def test_training_continues_without_a_lost_host_and_with_it_after_its_return(monkeypatch):
    """The returned host counts its restarts from 0 again; the other host counts from 1."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    options = {"nnodes": "1:2", "port": free_port(), "conf": SOON, "max_restarts": 3}

    def reports_of(size, *agents):
        return [r for r in reports(*agents) if r["size"] == size and "loss" in r]

    hosts = loopback_addresses(2)
    with Job() as job:
        first, lost = start_two(hosts, job, ELASTIC, nproc=(1, 1), attempts=(3, 1), **options)
        first.wait_until(lambda: reports_of(2, first) and reports_of(2, lost))
        lost.kill_all()
        first.wait_until(lambda: reports_of(1, first))
        back = job.start(torchrun(hosts, 1, **options), hosts[1], num_ranks=1)
        first.wait_until(lambda: len(reports_of(2, first)) == 2 and reports_of(2, back))
        job.write("stop", "")

        assert first.wait_end() == 0, first.output
        assert back.wait_end() == 0, back.output
        for report in [*reports_of(1, first), *reports_of(2, first, lost, back)]:
            assert report["loss"] == pytest.approx(plain_losses(1)[0], abs=1e-12)
        assert [report["attempt"] for report in reports_of(2, first, back)] == ["0", "1", "0"]
        assert {*reports_of(2, back)[0]["links"].values()} == {"AF_INET"}
        assert " ended without a message" in first.output
        assert not job.survivors()
