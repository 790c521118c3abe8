"""Watching the other ranks, beside the collectives: a connection from each to rank 0, on which both sides say every
second that they live.

A killed process closes its connection; a stopped one is silent. Either way every rank ends within seconds, whatever
collective it waits in, and one of them says why: rank 0, or where rank 0 is the one that is gone, each of the others.
A rank that fails sends its message to rank 0, which ends the command with it.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvcore.communicator import Communicator, LostRankError

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 10.0
GRACE_SECONDS = 1.0  # for a rank's own message to come before the news that it has gone
TOKEN_BYTES = 16

Ending = Callable[[str | None, int], None]


def end_process(line: str | None, code: int) -> None:
    """One line on stderr, if there is something to say, and the end of the process whatever its threads wait for."""
    if line is not None:
        os.write(2, f"kvcore: error: {' '.join(line.split())}\n".encode())
    os._exit(code)


@dataclass(slots=True)
class _Peer:
    rank: int
    connection: socket.socket
    heard: float = field(default_factory=time.monotonic)
    received: bytes = b""
    said_bye: bool = False


class Monitor:
    """Rank 0's connections to all others, or another rank's to rank 0. Runs a thread of its own until `close`."""

    def __init__(self, ranks: Communicator, host: str, end: Ending = end_process) -> None:
        """Connects; every rank does it at the same time. LostRankError where one does not come."""
        self._rank, self._size, self._end = ranks.rank, ranks.size, end
        self._peers = _accept(ranks) if ranks.rank == 0 else [_Peer(0, _connect(ranks, host))]
        self._closing = threading.Event()
        self._failing = threading.Event()
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="kvcore-ranks", daemon=True)
        self._thread.start()

    def fail(self, line: str, code: int) -> None:
        """This rank ends because of an error: tell rank 0, which says so, or, on rank 0, let the others end quietly.
        Returns when the others know, or after a few seconds."""
        self._failing.set()
        self._send({"failed": line, "code": code})
        if self._rank:
            self._thread.join(SILENCE_SECONDS)

    def settle(self) -> None:
        """Called when a collective failed: gives the thread time to find out why, and to end the process."""
        self._thread.join(SILENCE_SECONDS + 2)

    def close(self) -> None:
        """This rank is done; the others are, or will be told so by a command."""
        if not self._closing.is_set():
            self._send({"bye": True})
            self._closing.set()
            self._thread.join(2 * BEAT_SECONDS)
            for peer in self._peers:
                peer.connection.close()

    def _send(self, message: dict[str, object]) -> None:
        data = json.dumps(message).encode() + b"\n"
        with self._sending:
            for peer in self._peers:
                try:
                    peer.connection.sendall(data)
                except OSError:
                    continue  # the thread will see that it has gone

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for peer in self._peers:
                selector.register(peer.connection, selectors.EVENT_READ, peer)
            beat = 0.0
            while not self._closing.is_set():
                if time.monotonic() - beat >= BEAT_SECONDS:
                    self._send({})
                    beat = time.monotonic()
                for key, _ in selector.select(BEAT_SECONDS / 4):
                    if not self._read(key.data):
                        selector.unregister(key.fileobj)
                for peer in self._peers:
                    if not peer.said_bye and time.monotonic() - peer.heard > SILENCE_SECONDS:
                        self._lost(peer, f"has said nothing for {SILENCE_SECONDS:.0f} s: it hangs, or its host is gone")

    def _read(self, peer: _Peer) -> bool:
        """Take in what has come; False when nothing more will."""
        try:
            data = peer.connection.recv(65536)
        except OSError:
            data = b""
        if not data:
            if not peer.said_bye and not self._closing.is_set():
                self._lost(peer, "has ended: it was killed or has crashed")
            return False
        peer.heard = time.monotonic()
        peer.received += data
        *lines, peer.received = peer.received.split(b"\n")
        for line in lines:
            message = json.loads(line)
            peer.said_bye |= "bye" in message
            if "failed" in message:
                self._failed(peer, str(message["failed"]), int(message["code"]))
        return True

    def _lost(self, peer: _Peer, how: str) -> None:
        if self._failing.is_set():  # this rank's own error is on its way
            self._closing.set()
            return
        line = f"rank {peer.rank} of {self._size} {how}; the other ranks end too, start all of them again"
        self._send({"failed": line, "code": 1})
        self._end(line, 1)

    def _failed(self, peer: _Peer, line: str, code: int) -> None:
        if self._rank:  # rank 0 says it
            self._end(None, code)
        elif not self._failing.wait(GRACE_SECONDS):  # an error that all ranks meet is said by rank 0 itself
            self._send({"failed": line, "code": code})
            self._end(line if line.startswith("rank ") else f"rank {peer.rank} of {self._size}: {line}", code)


def _accept(ranks: Communicator) -> list[_Peer]:
    """Listen, tell the others where, and wait for a connection from each of them."""
    token = secrets.token_bytes(TOKEN_BYTES)
    with socket.create_server(("", 0), backlog=ranks.size) as server:
        server.settimeout(60)
        port = server.getsockname()[1]
        place = np.array([port, *token, *_host_name()], np.int32)
        ranks.all_sum(place)
        peers: list[_Peer] = []
        while len(peers) < ranks.size - 1:
            try:
                connection, _ = server.accept()
                connection.settimeout(10)
                hello = _exactly(connection, TOKEN_BYTES + 4)
            except OSError as error:
                missing = ranks.size - 1 - len(peers)
                raise LostRankError(f"{missing} of {ranks.size} ranks did not connect to rank 0: {error}") from error
            if secrets.compare_digest(hello[:TOKEN_BYTES], token):
                peers.append(_Peer(int.from_bytes(hello[TOKEN_BYTES:], "little"), connection))
            else:
                connection.close()
    return peers


def _connect(ranks: Communicator, host: str) -> socket.socket:
    own = _host_name()
    place = np.asarray(ranks.all_sum(np.zeros(1 + TOKEN_BYTES + len(own), np.int32)))
    token = bytes(place[1 : 1 + TOKEN_BYTES].astype(np.uint8))
    here = bytes(place[1 + TOKEN_BYTES :].astype(np.uint8)) == own
    try:
        connection = socket.create_connection(("127.0.0.1" if here else host, int(place[0])), timeout=30)
        connection.sendall(token + ranks.rank.to_bytes(4, "little"))
    except OSError as error:
        raise LostRankError(f"rank {ranks.rank} cannot reach rank 0 at {host}:{place[0]}: {error}") from error
    return connection


def _host_name() -> bytes:
    return socket.gethostname().encode()[:64].ljust(64, b"\0")


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("closed")
        data += part
    return data
