"""Gloo listens where it should, and nowhere else."""

from __future__ import annotations

import socket

import psutil
import pytest
import torch

from procpipe.replicas.gloo import GlooGroup


def addresses():
    connections = psutil.Process().net_connections("inet")
    return {tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN}


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
