"""A proxy between a worker and PostgreSQL that breaks the link at a chosen request.

Requests are counted from 1 over all links, in the order in which they arrive. A single thread does
all the work, so a fault happens between two requests and never beside one.
"""

from __future__ import annotations

import contextlib
import re
import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.faults.frames import (
    AUTHENTICATED,
    CANCEL_REQUEST,
    ENDS_ANSWER,
    NOTIFICATION,
    Frame,
    Frames,
    Request,
    Requests,
)

#: Seconds in which the server must take the bytes sent to it.
PATIENCE = 30.0
When = Literal["before", "after", "passing"]
ANY = re.compile("")
COMMIT = re.compile(r"\bcommit\b", re.IGNORECASE)


@dataclass(eq=False, slots=True)
class Link:
    """A connection of the worker, and the matching one to the server."""

    number: int
    client: socket.socket
    server: socket.socket
    up: Frames = field(default_factory=lambda: Frames(starts_untyped=True))
    down: Frames = field(default_factory=Frames)
    requests: Requests = field(default_factory=Requests)
    #: The number of its latest request.
    latest: int = 0
    #: Called once the server has answered; the answer is withheld from the client.
    doomed: Fault | None = None
    #: No data passes in either direction.
    held: bool = False


@dataclass(frozen=True, slots=True)
class Fault:
    """The event at request number `at` of those `among`: `act` gets the link, in the proxy.

    `before`: the request is lost, and the link is cut. `after`: the server has answered it, the
    answer is lost, and the link is cut. `passing`: the request passes once `act` is done.
    """

    at: int
    act: Callable[[Link], object]
    when: When = "before"
    among: re.Pattern[str] = ANY


class Proxy:
    """Passes bytes between a worker and the server at `target` until a fault is due."""

    def __init__(self, target: str | tuple[str, int]) -> None:
        """`target` is the path of a socket, or a host and a port."""
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ, None)
        self._alarm, self._bell = socket.socketpair()
        self._selector.register(self._alarm, selectors.EVENT_READ, None)
        self._todo: list[Callable[[], object]] = []
        self._links: list[Link] = []
        self._opened = 0
        self._reset()
        threading.Thread(target=self._run, name="proxy", daemon=True).start()

    def _reset(self) -> None:
        #: The requests that arrived: the link's number and the SQL of each, in order.
        self.log: list[tuple[int, str]] = []
        self.fault: Fault | None = None
        #: Set once the fault has happened.
        self.struck = threading.Event()
        #: The number of the request, among all, at which the fault happened.
        self.struck_at = 0
        self._counted = 0
        self.refusing = False
        self.refused = 0
        self.deaf = False

    @property
    def port(self) -> int:
        return int(self._listening.getsockname()[1])

    # ---- from any thread

    def begin(self, fault: Fault | None = None, *, deaf: bool = False) -> None:
        """Cut every link, count from 1 again, and wait for `fault`.

        If `deaf`, no notification of the server passes.
        """

        def begin() -> None:
            self.cut_all()
            self._reset()
            self.fault, self.deaf = fault, deaf

        self._call(begin)

    def let_in(self) -> None:
        """Accept connections again, and let held links continue."""

        def let_in() -> None:
            self.refusing = False
            for link in [each for each in self._links if each.held]:
                link.held = False
                for end in (link.client, link.server):
                    self._selector.register(end, selectors.EVENT_READ, link)

        self._call(let_in)

    def _call(self, do: Callable[[], object]) -> None:
        done = threading.Event()
        self._todo.append(lambda: (do(), done.set()))
        self._bell.send(b"!")
        if not done.wait(PATIENCE):
            raise AssertionError("the proxy does not answer")

    # ---- for faults, in the proxy's thread

    def cut(self, link: Link) -> None:
        """End both ends of `link`."""
        if link in self._links:
            self._links.remove(link)
            for end in (link.client, link.server):
                if not link.held:
                    self._selector.unregister(end)
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def cut_all(self) -> None:
        for link in list(self._links):
            self.cut(link)

    def refuse(self) -> None:
        """Cut every link, and accept none until `let_in()`."""
        self.refusing = True
        self.cut_all()

    def hold(self, link: Link) -> None:
        """Let no data pass on `link`, in either direction, until `let_in()`."""
        link.held = True
        for end in (link.client, link.server):
            self._selector.unregister(end)

    # ---- the thread

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._alarm:
                    self._alarm.recv(1)
                    self._todo.pop(0)()
                elif key.fileobj is self._listening:
                    self._accept()
                elif key.data in self._links and not key.data.held:
                    self._pass(key.data, key.fileobj)

    def _accept(self) -> None:
        client, _ = self._listening.accept()
        if self.refusing:
            self.refused += 1
            client.close()
            return
        server = self._connect()
        self._opened += 1
        link = Link(self._opened, client, server)
        for end in (client, server):
            end.settimeout(PATIENCE)
            if end.family != socket.AF_UNIX:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(end, selectors.EVENT_READ, link)
        self._links.append(link)

    def _connect(self) -> socket.socket:
        if isinstance(self._target, tuple):
            return socket.create_connection(self._target)
        server = socket.socket(socket.AF_UNIX)
        server.connect(self._target)
        return server

    def _pass(self, link: Link, end: Any) -> None:
        try:
            data = end.recv(65536)
            if end is link.client:
                for frame in link.up.feed(data):
                    self._upwards(link, frame)
            elif data:
                self._downwards(link, data)
            if not data:
                self._ended(link)
        except OSError:
            self._ended(link)

    def _ended(self, link: Link) -> None:
        if link.doomed:
            self._strike(link.doomed, link)
        self.cut(link)

    def _upwards(self, link: Link, frame: Frame) -> None:
        if link not in self._links or link.held or link.doomed:
            return
        request = link.requests.add(frame)
        if request is None:
            return
        if request.kind == 0 and request.data[4:8] != (196608).to_bytes(4):
            self._before_start(link, request)
            return
        self.log.append((link.number, request.text))
        link.latest = len(self.log)
        fault = self._due(request)
        if fault is None:
            link.server.sendall(request.data)
        elif fault.when == "before":
            self._strike(fault, link)
        elif fault.when == "after":
            link.doomed = fault
            link.server.sendall(request.data)
        else:
            self._strike(fault, link)
            link.server.sendall(request.data)

    def _due(self, request: Request) -> Fault | None:
        """Return the fault, once, at its request."""
        fault = self.fault
        if fault is None or not fault.among.search(request.text):
            return None
        self._counted += 1
        if self._counted < fault.at:
            return None
        self.fault = None
        return fault

    def _before_start(self, link: Link, request: Request) -> None:
        """Refuse encryption, which would hide the frames; pass on a request to cancel."""
        if int.from_bytes(request.data[4:8]) == CANCEL_REQUEST:
            link.server.sendall(request.data)
        else:
            link.client.sendall(b"N")

    def _downwards(self, link: Link, data: bytes) -> None:
        frames = link.down.feed(data)
        if not link.doomed:
            link.client.sendall(
                b"".join(
                    each.data for each in frames if not (self.deaf and each.kind == NOTIFICATION)
                )
            )
        elif any(each.kind in ENDS_ANSWER and each.data != AUTHENTICATED for each in frames):
            self._strike(link.doomed, link)

    def _strike(self, fault: Fault, link: Link) -> None:
        link.doomed = None
        self.struck_at = link.latest
        fault.act(link)
        if fault.when != "passing":
            self.cut(link)
        self.struck.set()
