"""A job on one host listens on no network address."""

from __future__ import annotations

import socket
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import procpipe.job.joining
from procpipe import Stage
from procpipe.channel.link import INLINE_BYTES
from procpipe.replicas.gloo import GlooGroup

starting: Any = procpipe.job.joining


def listening(world):
    """Run a forward; return the kinds of the listening sockets, and their IP addresses."""
    listen = starting.listen
    kinds: list[str] = []

    def note(tcp_host):
        sockets, address = listen(tcp_host)
        kinds.extend(sock.family.name for sock in sockets)
        return sockets, address

    before = addresses()
    starting.listen = note
    try:
        stage = Stage(nn.Sequential(nn.ReLU(), nn.ReLU()), [1, 1], world=world)
        with torch.no_grad():
            stage(torch.ones(2, INLINE_BYTES))
        return kinds, {ip for ip, _ in addresses() - before}
    finally:
        starting.listen = listen
        stage.close()


def addresses():
    connections = psutil.Process().net_connections("inet")
    return {tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN}


def test_a_job_on_one_host_does_not_listen_on_the_network(ranks):
    for kinds, listens_on in ranks(2).run(listening).values():
        assert kinds == ["AF_UNIX"]
        assert not listens_on


def test_gloo_listens_on_the_given_address(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)

    assert where_gloo_listens() == {"127.0.0.2"}


def test_gloo_listens_on_the_users_interface(monkeypatch):
    """Symptom: it listened on 127.0.0.1, since ``create_default_device`` ignores the variable."""
    for name, its_addresses in psutil.net_if_addrs().items():
        for address in its_addresses:
            if address.family == socket.AF_INET:
                monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
                assert where_gloo_listens() == {address.address}, name

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    with pytest.raises(RuntimeError, match="none0"):
        where_gloo_listens()


def where_gloo_listens():
    before = addresses()
    group = GlooGroup(torch.distributed.HashStore(), 0, 1, 5.0, "127.0.0.2")
    new = {ip for ip, _ in addresses() - before}
    group.close()
    return new
