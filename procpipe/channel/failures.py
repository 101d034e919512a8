"""Which peers of a rank have left, and the first failure, which every wait then raises.

    FAILURE of a peer              first failure: RemoteStageError, or PeerLostError; passed on once
    its end without a message      first failure: PeerLostError
    GOODBYE of a peer              it has left: a failure only if this rank needs it later

Opens and reads no socket.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence

from procpipe.channel.native_waits import WaitReports
from procpipe.errors import PeerLostError, ProcpipeError, RemoteStageError, StageClosedError


class Failures:
    """What is known on one rank of failures and of peers that have left.

    ``ranks`` holds each rank's number in the job, and ``name_of`` describes a rank.

    Attributes:
        first: the first failure.
        left: the peers that have sent a goodbye.
        is_sent: whether this rank has sent a failure to its peers, or must not.
        has_parted: whether it has sent them a goodbye.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        name_of: Callable[[int], str],
        reports: WaitReports,
    ) -> None:
        self.first: ProcpipeError | None = None
        self.left: set[int] = set()
        self.is_sent = self.has_parted = False
        self._rank = rank
        self._ranks = ranks
        self._name_of = name_of
        self._reports = reports

    def note_lost(self, peer: int, is_local: bool) -> None:
        """Note that a peer has ended."""
        # No fault after this rank's goodbye: the peer may have ended without sending its own.
        if not (peer in self.left or self.first is not None or self.has_parted):
            self.first = self.lost(peer, is_local)

    def note_forked(self) -> None:
        """Note, in a forked child, that only its parent can use the connections."""
        self.is_sent = True
        self.first = StageClosedError(
            f"this process ({os.getpid()}) was forked from that of rank {self._ranks[self._rank]} "
            f"({os.getppid()}): only that one can use its stage"
        )

    def gone(self, peer: int, meanwhile: str) -> PeerLostError:
        """Return the error for a peer that has left while this rank still does something."""
        return PeerLostError(
            self._ranks[peer],
            f"{self._name_of(peer)} has left the pipeline (its script ended, or closed its "
            f"stage) while {self._name_of(self._rank)} {meanwhile}: every rank must make the "
            "same calls",
        )

    def lost(self, peer: int, is_local: bool) -> PeerLostError:
        """Return the error for a peer that ended without a message."""
        elsewhere = "" if is_local else ", or its host or network failed"
        story = (
            f"{self._name_of(peer)} ended without a message: it was killed (out of memory?) or "
            f"crashed{elsewhere}; see its own output and the launcher's exit code"
        )
        seen = self._reports.last_seen(peer)
        return PeerLostError(self._ranks[peer], f"{story}; {seen}" if seen else story)


def encode_failure(error: RemoteStageError, **more: float) -> str:
    """Return a rank's failure as JSON, with entries for other readers."""
    is_lost = isinstance(error, PeerLostError)
    return json.dumps({"rank": error.rank, "story": error.story, "is_lost": is_lost, **more})


def decode_failure(text: str | bytes) -> RemoteStageError:
    """Return the failure that :func:`encode_failure` was given."""
    sent = json.loads(text)
    error_type = PeerLostError if sent.get("is_lost") else RemoteStageError
    return error_type(sent["rank"], sent["story"])
