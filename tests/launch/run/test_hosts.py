"""One job on several hosts: TCP between them, nothing for strangers, hosts that go and come."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.launch.run.hosts import (
    TORCHRUN,
    Job,
    free_port,
    loopback_addresses,
    network_namespaces,
)

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]  # many processes, on a busy machine

#: Stops at what a test wants to happen, and prints what it wants to know.
TRAIN = """
import json, os, signal, socket, sys, time
import psutil, torch, torch.nn.functional as F
from torch import nn
import procpipe.job.joining as starting
from procpipe import Stage

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def tell(**words):
    os.write(1, (json.dumps({"rank": RANK, "size": SIZE, **words}) + "\\n").encode())

def model():
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Linear(8, 8, dtype=torch.float64) for _ in range(3)])

torch.manual_seed(0)
x = torch.randn(1 << 13, 8, dtype=torch.float64)  # 128 KiB a micro-batch: by gloo

def build(balance, **options):
    return Stage(model(), balance, chunks=4, loss_fn=F.mse_loss, **options)

def links(stage):
    mesh = stage._world._mesh
    return {peer: mesh.socket_of(peer).family.name for peer in mesh.peers}

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
    """Return the command that starts one host's processes; the first has the meeting point."""
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


def told(*processes):
    """Return what the ranks told, in the order in which each host's did."""
    lines = [line for process in processes for line in process.output.splitlines()]
    return [json.loads(line) for line in lines if line.startswith('{"rank"')]


# -- one job -------------------------------------------------------------------------------------

#: A stranger speaks to each rank that waits for this one, and later to gloo.
MEET_STRANGERS = """
connect_to, listen, sockets = starting.connect_to, starting.listen, set()
NOISE = (
    b"", b"GET / HTTP/1.1\\r\\n\\r\\n" + bytes(64), b"procpipe2" + bytes(100), os.urandom(9999)
)

def disturb(address):
    for words in NOISE:
        with socket.create_connection(address) as stranger:
            stranger.sendall(words)

def disturb_and_connect_to(peer, address, us):
    disturb(address.tcp)
    return connect_to(peer, address, us)

def note_and_listen(host):
    listeners, address = listen(host)
    sockets.update(sock.getsockname()[0] for sock in listeners if sock.family != socket.AF_UNIX)
    return listeners, address

starting.connect_to, starting.listen = disturb_and_connect_to, note_and_listen
stage = build([1, 1, 1])
first = train(stage, 1)
mine = psutil.Process().net_connections("inet")
ports = [tuple(one.laddr) for one in mine if one.status == psutil.CONN_LISTEN]
for port in ports:
    disturb(port)
tell(losses=first + train(stage, 2), listened=sorted(sockets), listens=[ip for ip, _ in ports],
     links=links(stage), pid=os.getpid())
while True:
    train(stage, 1)
"""


def start_two(hosts, job, script, nproc=(1, 2), port=29400, **options):
    job.write("train.py", TRAIN + script)
    return [
        job.start(host, torchrun(hosts, number, nproc=nproc[number], port=port, **options))
        for number, host in enumerate(hosts)
    ]


@contextlib.contextmanager
def two_hosts():
    """Give network namespaces; addresses of the loopback where they cannot be made."""
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(network_namespaces(2))
        except pytest.skip.Exception as reason:
            print(f"on the loopback: {reason}")
            hosts = stack.enter_context(loopback_addresses(2))
        yield hosts


def test_hosts_of_different_sizes_train_as_one_process_until_a_rank_is_killed():
    with two_hosts() as hosts, Job() as job:
        agents = start_two(hosts, job, MEET_STRANGERS, port=free_port())
        job.wait_until(lambda: len(told(*agents)) == 3)
        ranks = {one["rank"]: one for one in told(*agents)}
        host_of = {one["rank"]: number for number in (0, 1) for one in told(agents[number])}
        (victim,) = told(agents[0])
        killed_s = time.monotonic()
        os.kill(victim["pid"], signal.SIGKILL)

        assert [agent.wait_end() for agent in agents] == [1, 1]
        assert time.monotonic() - killed_s < 30.0
        assert sorted(ranks) == [0, 1, 2]
        assert sorted(host_of.values()) == [0, 1, 1]
        for rank, one in ranks.items():
            assert one["losses"] == pytest.approx(plain_losses(3), abs=1e-12)
            address = hosts[host_of[rank]].address
            assert one["listened"] == [address]  # the sockets between ranks
            assert set(one["listens"]) == {address}  # gloo
            assert one["links"] == {
                str(peer): "AF_UNIX" if host_of[peer] == host_of[rank] else "AF_INET"
                for peer in ranks
                if peer != rank
            }
        story = rf"rank \d ends, because rank {victim['rank']} ended without a word"
        assert len(re.findall(story, agents[1].output)) == 2, agents[1].output
        assert "or its host or network failed" in agents[1].output
        assert not job.survivors()


# -- hosts that go and come ----------------------------------------------------------------------

#: Rank 0's loader ends, and with it every rank's, when the test says so.
ELASTIC = """
def until_told():
    while not os.path.exists("stop"):
        yield x, x

stage = build([3] if SIZE == 1 else [1, 2], timeout_s=60)
for step, (input, target) in enumerate(stage.batches(until_told())):
    loss = stage.step(input, target).item()
    if step == 0:
        tell(loss=loss, attempt=os.environ["TORCHELASTIC_RESTART_COUNT"], links=links(stage))
tell(ended=True)
"""

#: A host is given up after six seconds without a word, and a late one waited for one second.
SOON = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=6"


def test_a_host_that_is_lost_is_done_without_and_may_come_back(monkeypatch):
    """Its restarts are counted from 0 again, and the other's from 1: both are of one round."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    options = {"nnodes": "1:2", "port": free_port(), "conf": SOON, "max_restarts": 3}

    def told_of(size, *agents):
        return [one for one in told(*agents) if one["size"] == size and "loss" in one]

    with loopback_addresses(2) as hosts, Job() as job:
        first, lost = start_two(hosts, job, ELASTIC, nproc=(1, 1), **options)
        job.wait_until(lambda: told_of(2, first) and told_of(2, lost))
        lost.kill_all()
        job.wait_until(lambda: told_of(1, first))
        back = job.start(hosts[1], torchrun(hosts, 1, **options))
        job.wait_until(lambda: len(told_of(2, first)) == 2 and told_of(2, back))
        job.write("stop", "")

        assert first.wait_end() == 0, first.output
        assert back.wait_end() == 0, back.output
        for one in [*told_of(1, first), *told_of(2, first, lost, back)]:
            assert one["loss"] == pytest.approx(plain_losses(1)[0], abs=1e-12)
        assert [one["attempt"] for one in told_of(2, first, back)] == ["0", "1", "0"]
        assert {*told_of(2, back)[0]["links"].values()} == {"AF_INET"}
        assert " ended without a word" in first.output
        assert not job.survivors()
