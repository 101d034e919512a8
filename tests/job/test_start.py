"""How ranks find and connect to one another; here each is a thread of one process."""

from __future__ import annotations

import json
import os
import socket
import threading
import uuid

import pytest
from torch.distributed import HashStore

from procpipe.channel.mesh import Mesh
from procpipe.channel.monitor import Monitor, Reports
from procpipe.errors import PeerLostError, RemoteStageError, WaitTimeoutError
from procpipe.job import start
from procpipe.job.grid import Grid
from procpipe.job.start import Meeting, Start, host_identity, own_address

DEADLINE_S = 20.0


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in ("PROCPIPE_ADDRESS", "PROCPIPE_KEY", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


class Rank(threading.Thread):
    """A rank that connects in a thread of its own, on a host of its own if that is named."""

    def __init__(self, rank, num_ranks, meeting, host="", timeout_s=DEADLINE_S):
        super().__init__(name=host, daemon=True)
        self.mesh = Mesh(Monitor(rank, Reports(), timeout_s=timeout_s, stall_timeout_s=DEADLINE_S))
        self.file = os.memfd_create("a file")
        grid = Grid(rank, num_ranks)
        self.connection = Start(self.mesh, grid, meeting, [self.file])
        self.error = None

    def run(self):
        try:
            self.connection.connect()
        except Exception as error:
            self.error = error

    def ended(self):
        """Wait until it has connected; return its error."""
        self.join(DEADLINE_S)
        assert not self.is_alive()
        return self.error

    def close(self):
        self.mesh.close()
        os.close(self.file)
        for files in self.connection.files_of.values():
            for file in files:
                os.close(file)


@pytest.fixture
def job(monkeypatch):
    """Return a function that starts some ranks of a job, one letter a rank: its host."""
    monkeypatch.setattr(start, "host_identity", lambda: threading.current_thread().name)
    ranks = []

    def begin(hosts, num_ranks=None, meeting=None, first=0, **options):
        meeting = meeting or meeting_of(hosts)
        num_ranks = num_ranks or len(hosts)
        new = [Rank(first + k, num_ranks, meeting, host, **options) for k, host in enumerate(hosts)]
        ranks.extend(new)
        for rank in new:
            rank.start()
        return new

    yield begin
    for rank in ranks:
        rank.join(DEADLINE_S)
        rank.close()


def meeting_of(hosts):
    is_on_one_host = len(set(hosts)) == 1
    return Meeting(f"all/0/{uuid.uuid4()}", is_on_one_host, None if is_on_one_host else HashStore())


def inode(file):
    return os.fstat(file).st_ino


@pytest.mark.parametrize("hosts", ["xxxx", "xy", "xyxz"])
def test_all_ranks_connect_to_one_another(job, hosts):
    ranks = job(hosts)

    assert [rank.ended() for rank in ranks] == [None] * len(hosts)
    for number, rank in enumerate(ranks):
        others = {other for other in range(len(hosts)) if other != number}
        assert {*rank.mesh.peers} == others
        same_host = {other for other in others if hosts[other] == hosts[number]}
        files = rank.connection.files_of
        assert {peer: inode(file) for peer, (file,) in files.items()} == {
            peer: inode(ranks[peer].file) for peer in same_host
        }
        for peer in others:
            is_local = rank.mesh._data[peer].sock.family == socket.AF_UNIX
            assert is_local == (peer in same_host)
            received: list[object] = []
            rank.mesh.on(peer, 7, lambda *frame, received=received: received.append(frame))
            ranks[peer].mesh.send(number, 7, 0, 1, b"hello")
            rank.mesh.wait(lambda received=received: received, lambda: "hello", peer=peer)


@pytest.mark.parametrize("hosts", ["xx", "xy"])
def test_a_long_story_arrives(job, hosts):
    """Symptom: the peer was said to have ended without a message."""
    ranks = job(hosts)
    assert [rank.ended() for rank in ranks] == [None, None]
    story = "\N{GRINNING FACE}" * (1 << 16) + "\udcff"

    ranks[0].mesh.fail(RemoteStageError(0, story))
    ranks[0].mesh.close()

    with pytest.raises(RemoteStageError) as caught:
        ranks[1].mesh.wait(lambda: False, lambda: "nothing")
    assert caught.value.story == story


def test_jobs_of_one_host_do_not_meet_nor_listen_on_the_network(job, monkeypatch):
    monkeypatch.setattr(start, "own_address", None)

    assert all(rank.ended() is None for rank in [*job("xx"), *job("xx"), *job("xxx")])


def test_a_job_may_start_again_at_once(job):
    meeting = meeting_of("xx")
    for _ in range(3):  # a rank may begin while another still listens for the round before
        ranks = job("xx", meeting=meeting)
        assert [rank.ended() for rank in ranks] == [None, None]


# -- older entries of the store ------------------------------------------------------------------


@pytest.mark.parametrize("what", ["nothing", "another key", "an end"])
def test_an_older_entry_of_the_store_is_read_again(job, monkeypatch, what):
    monkeypatch.setattr(start, "_HANDSHAKE_TIMEOUT_S", 0.05)
    meeting = meeting_of("xy")
    with socket.create_server(("127.0.0.1", 0)) as older:
        entry = ["x", "\0older", *older.getsockname(), "0" * 64]
        meeting.store.set("procpipe/all/0/address/0", json.dumps(entry))
        if what == "nothing":
            older.close()
        (late,) = job("y", 2, meeting, first=1)
        if what != "nothing":
            link, _ = older.accept()
            older.close()  # ends what else connects
            if what == "another key":
                link.recv(1000)
                link.sendall(bytes(64))
            else:
                link.close()
        (first,) = job("x", 2, meeting)

        assert [first.ended(), late.ended()] == [None, None]
        if what != "nothing":
            link.close()


@pytest.mark.parametrize("keys", [("a", "b"), ("", "b"), ("a", "a")])
def test_ranks_with_different_keys(job, monkeypatch, keys):
    meeting, ranks = meeting_of("xy"), []
    options = {} if len({*keys}) == 1 else {"timeout_s": 0.5}
    for number, key in enumerate(keys):
        monkeypatch.setenv("PROCPIPE_KEY", key)  # "" counts as none
        ranks += job("xy"[number], 2, meeting, first=number, **options)
    errors = [rank.ended() for rank in ranks]

    if len({*keys}) == 1:
        assert errors == [None, None]
        assert json.loads(meeting.store.get("procpipe/all/0/address/0"))[-1] == ""
    else:
        assert isinstance(errors[1], ValueError)  # at once
        words = (
            "what listens for rank 0 does not know the key of rank 1: give every rank of the job"
        )
        assert words in str(errors[1])


# -- ranks that do not come, and others that do --------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "first", "num_ranks", "words"),
    [
        ("xx", 0, 4, "rank 0 has waited 0.2 s for ranks 2, 3 to start; if that "),
        ("xx", 1, 3, "rank 2 has waited 0.2 s for rank 0 to start"),
        ("xy", 1, 3, "rank 2 has waited 0.2 s for rank 0 to start"),
    ],
)
def test_a_rank_that_does_not_come_is_named(job, hosts, first, num_ranks, words):
    ranks = job(hosts, num_ranks, first=first, timeout_s=0.2)

    errors = [rank.ended() for rank in ranks]
    assert all(isinstance(error, (WaitTimeoutError, PeerLostError)) for error in errors)
    assert any(words in str(error) for error in errors), errors


@pytest.mark.parametrize("hosts", ["xxx", "xyz"])
def test_a_rank_that_ends_during_the_start_is_noticed(job, hosts):
    """Rank 1 has connected to rank 0, and ends while rank 2 does not come."""
    meeting = meeting_of(hosts)
    (first,) = job(hosts[0], 3, meeting)
    (second,) = job(hosts[1], 2, meeting, first=1)  # so that it does not wait for rank 2
    assert second.ended() is None
    second.mesh.close()

    error = first.ended()
    assert isinstance(error, PeerLostError)
    assert str(error).startswith("rank 1 failed:\nrank 1 ended without a message")


@pytest.mark.parametrize("refuses", ["connector", "acceptor"])
def test_a_rank_of_another_user_is_refused(job, monkeypatch, refuses):
    ours, meeting = os.geteuid(), meeting_of("xx")
    other = "rank 1" if refuses == "connector" else "rank 0"
    monkeypatch.setattr(os, "geteuid", lambda: ours + (threading.current_thread().name == other))
    ranks = [*job(["rank 0"], 2, meeting, timeout_s=0.3)]
    ranks += job(["rank 1"], 2, meeting, first=1, timeout_s=0.3)
    first, second = (rank.ended() for rank in ranks)

    assert isinstance(first, WaitTimeoutError)
    if refuses == "connector":
        assert isinstance(second, PermissionError)  # at once
        assert f"a process of another user (number {ours}) has the socket of a rank" in str(second)
    else:
        assert isinstance(second, WaitTimeoutError)


def test_an_address_of_another_host_is_named(job, monkeypatch):
    monkeypatch.setenv("PROCPIPE_ADDRESS", "192.0.2.1")
    error = job("xy")[0].ended()

    assert isinstance(error, ValueError)  # at once
    assert "192.0.2.1 is not an address of this host ([Errno 99] Cannot assign" in str(error)


def test_the_end_of_the_store_is_that_of_rank_0(job):
    class Ended(HashStore):
        def set(self, key, value):
            pass

        def check(self, keys):
            raise RuntimeError("Broken pipe")

    (second,) = job("y", 2, Meeting("all/0", False, Ended()), first=1)
    error = second.ended()
    assert isinstance(error, PeerLostError)
    assert error.rank == 0


# -- the environment -----------------------------------------------------------------------------


def test_pipelines_and_rounds_of_a_job_have_names_of_their_own(monkeypatch):
    names = "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"
    usual = dict.fromkeys(names, "1") | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}

    def meeting(numbers=None, number=0, **changed):
        for name, value in (usual | changed).items():
            monkeypatch.setenv(name, value)
        return Meeting.from_environment(numbers, number)

    same = meeting()
    others = [
        meeting(number=1),
        meeting([0, 1]),
        meeting([0, 2]),
        *(meeting(**{name: "2"}) for name in names),
    ]

    assert meeting() == same
    assert len({each.name for each in [same, *others]}) == 8
    assert same.is_on_one_host
    assert not meeting(LOCAL_WORLD_SIZE="1").is_on_one_host
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert not Meeting.from_environment(None, 0).is_on_one_host
    monkeypatch.setenv("MASTER_ADDR", "")
    with pytest.raises(ValueError, match="are set: set MASTER_ADDR and MASTER_PORT, too"):
        Meeting.from_environment(None, 0)


def test_the_address_of_this_host(monkeypatch):
    default = host_identity()
    monkeypatch.setattr(start, "_ELSEWHERE", "127.0.0.1")
    assert own_address() == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.9")
    assert own_address() == "127.0.0.1"
    monkeypatch.setenv("PROCPIPE_ADDRESS", "127.0.0.7")
    assert own_address() == "127.0.0.7"
    given = host_identity()
    monkeypatch.setenv("PROCPIPE_ADDRESS", "192.0.2.1")
    assert len({default, given, host_identity()}) == 3


def test_a_loopback_address_is_replaced_by_the_one_of_the_way_out(monkeypatch):
    """As on Debian, where /etc/hosts has 127.0.1.1 for the host's own name."""
    ways = {"here": "127.0.1.1", start._ELSEWHERE: "127.0.0.9", "there": "192.168.0.7"}
    monkeypatch.setattr(start, "_address_on_the_way_to", ways.__getitem__)
    monkeypatch.setenv("MASTER_ADDR", "here")
    assert own_address() == "127.0.0.9"
    monkeypatch.setenv("MASTER_ADDR", "there")
    assert own_address() == "192.168.0.7"

    def no_way(host):
        if host == start._ELSEWHERE:
            raise OSError("Network is unreachable")
        return "::1"

    monkeypatch.setattr(start, "_address_on_the_way_to", no_way)
    assert own_address() == "::1"
    assert start._family("::1") == socket.AF_INET6


# -- sockets -------------------------------------------------------------------------------------


def test_only_tcp_sockets_are_probed(job):
    """Idle connections, too: the system would notice a host that has vanished after hours."""
    ranks = job("xxy")
    assert [rank.ended() for rank in ranks] == [None] * 3

    local, remote = ranks[0].mesh._data[1].sock, ranks[0].mesh._data[2].sock
    assert start._open_process(remote) is None
    assert not local.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    for link in (remote, ranks[0].mesh.monitor._alarms[2].sock):
        idle, interval, count = (
            link.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{name}"))
            for name in ("IDLE", "INTVL", "CNT")
        )
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert idle + interval * count == start._VANISHED_AFTER_S
