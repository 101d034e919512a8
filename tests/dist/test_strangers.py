"""Unknown processes connect to a job and send data: the run continues; nothing is unpickled."""

from __future__ import annotations

import ast
import contextlib
import os
import pickle
import socket
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import procpipe.channel.handshake
import procpipe.channel.sockets
import procpipe.job.joining
from procpipe import Stage
from procpipe.channel.link import INLINE_BYTES
from tests.dist.pool import ROOT

starting: Any = procpipe.job.joining
handshake: Any = procpipe.channel.handshake
sockets: Any = procpipe.channel.sockets

WIDTH = 4
BULK = 4 * INLINE_BYTES // WIDTH


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def invalid_greetings(path, rank):
    """Return what strangers send: nothing, noise, other protocols, a pickle, part of a greeting."""
    hello = handshake._HELLO.pack(handshake._MAGIC, rank, b"c" * 32)
    return [
        b"",
        b"\0",
        os.urandom(8),
        os.urandom(1 << 14),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        pickle.dumps(Bomb(path)),
        hello[:20],
        hello,
        hello + b"p" * 32,
        handshake._HELLO.pack(handshake._MAGIC, 99, b"c" * 32),
    ]


class Strangers:
    """Connections of strangers; every second one is closed at once, the others at the end."""

    def __init__(self):
        self.sockets = []
        self.num_connected = 0

    def connect(self, family, address, messages):
        for number, message in enumerate(messages):
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.settimeout(5.0)
            with contextlib.suppress(OSError):  # the listener may close it before all is sent
                sock.connect(address)
                self.num_connected += 1
                sock.sendall(message)
            if number % 2:
                sock.close()
            else:
                self.sockets.append(sock)

    def close(self):
        for sock in self.sockets:
            sock.close()


def losses_of(stage, num_samples=8):
    x, y = torch.ones(num_samples, WIDTH), torch.zeros(num_samples, WIDTH)
    return [stage.step(x, y).item() for _ in range(2)]


def model_of(num_stages):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(num_stages)])


def stage_of(world):
    model, balance = model_of(world.num_ranks), [1] * world.num_ranks
    return Stage(model, balance, world=world, chunks=2, loss_fn=F.mse_loss)


def plain_loss(num_stages, num_samples=8):
    x, y = torch.ones(num_samples, WIDTH), torch.zeros(num_samples, WIDTH)
    return F.mse_loss(model_of(num_stages)(x), y).item()


def check_unharmed(outcomes, path):
    for losses in outcomes.values():
        assert losses == pytest.approx([plain_loss(len(outcomes))] * 2)
    assert all(outcome.output == "" for outcome in outcomes), str(outcomes)
    assert not path.exists()


# -- while the ranks connect ---------------------------------------------------------------------


def connect_among_strangers(world, family, path):
    """Strangers connect to every rank's listener before any peer can connect."""
    strangers = Strangers()
    listen, modules = starting.listen, (starting, handshake, sockets)
    identity = sockets.host_identity

    def listen_to_strangers(tcp_host):
        listeners, address = listen(tcp_host)
        if family == "unix":
            target = (socket.AF_UNIX, f"\0{address.unix}")
        else:
            target = (socket.AF_INET, address.tcp)
        messages = invalid_greetings(path, rank=world.num_ranks - 1)
        thread = threading.Thread(target=strangers.connect, args=(*target, messages))
        thread.start()
        thread.join(10.0)  # the listener queues them until accept()
        return listeners, address

    starting.listen = listen_to_strangers
    if family == "tcp":  # as if each rank were on its own host
        for module in modules:
            module.host_identity = lambda: f"host {world.rank}"
    try:
        losses = losses_of(stage_of(world))
        assert strangers.num_connected == len(invalid_greetings(path, 0))
        return losses
    finally:
        strangers.close()
        starting.listen = listen
        for module in modules:
            module.host_identity = identity


@pytest.mark.parametrize(("n", "family"), [(2, "unix"), (2, "tcp"), (3, "unix"), (4, "tcp")])
def test_strangers_connect_while_the_ranks_connect(ranks, tmp_path, n, family):
    path = tmp_path / "unpickled"

    check_unharmed(ranks(n).run(connect_among_strangers, family, path), path)


# -- while the job runs --------------------------------------------------------------------------


def run_among_strangers(world, path):
    """Between two calls strangers connect to the store."""
    strangers = Strangers()
    stage = stage_of(world)
    x = torch.ones(BULK, WIDTH)
    with torch.no_grad():
        stage(x)
    if world.rank == 0:
        store = world._start.shared_store()
        while not hasattr(store, "port"):
            store = store.underlying_store
        for address in {("127.0.0.1", store.port)} | listening():
            strangers.connect(socket.AF_INET, address, invalid_greetings(path, rank=1))
        assert strangers.num_connected >= len(invalid_greetings(path, 1))
    with torch.no_grad():
        stage(x)
    losses = losses_of(stage)
    world._start.shared_store().set(f"well/{world.rank}", "yes")
    assert world._start.shared_store().get(f"well/{(world.rank + 1) % world.num_ranks}") == b"yes"
    strangers.close()
    return losses


def listening():
    connections = psutil.Process().net_connections("inet")
    return {tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("n", [2, 3])
def test_strangers_connect_to_the_store(ranks, tmp_path, n):
    path = tmp_path / "unpickled"

    check_unharmed(ranks(n).run(run_among_strangers, path), path)


# -- nothing is unpickled ------------------------------------------------------------------------

#: Modules and functions that unpickle their input.
UNPICKLING = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
UNPICKLING |= {"multiprocessing.connection", "multiprocessing.managers", "torch.multiprocessing"}
UNPICKLING_CALLS = {"broadcast_object_list", "all_gather_object", "gather_object", "recv_object"}
UNPICKLING_CALLS |= {"scatter_object_list", "recv_object_list", "send_object_list"}


def what_unpickles(source):
    """Return which of these a source file uses."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & UNPICKLING
        elif isinstance(node, ast.ImportFrom):
            names = {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
            found |= names & UNPICKLING
            found |= {alias.name for alias in node.names} & UNPICKLING_CALLS
        elif isinstance(node, ast.Attribute):
            found |= {node.attr} & UNPICKLING_CALLS
    return found


def test_nothing_in_the_package_unpickles_what_comes_over_the_network():
    sources = [path for part in ("procpipe", "launch") for path in Path(ROOT, part).rglob("*.py")]

    assert len(sources) > 50
    using = {str(path.relative_to(ROOT)): what_unpickles(path.read_text()) for path in sources}
    assert {path: found for path, found in using.items() if found} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from multiprocessing import connection",
        "def f():\n    from torch.distributed import broadcast_object_list",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
    ],
)
def test_what_unpickles_is_found(source):
    assert what_unpickles(source)
