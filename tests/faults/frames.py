"""PostgreSQL's wire protocol, as far as a proxy needs it: bytes in, whole messages out.

A client speaks in *requests*: everything it sends before it waits for an answer. A simple query is
one frame; a prepared one is Parse, Bind, Describe, Execute and Sync. Sync, Query and the frames of
the handshake end a request.

Source: PostgreSQL documentation, "Frontend/Backend Protocol".
"""

from __future__ import annotations

from dataclasses import dataclass, field

SSL_REQUEST, GSS_REQUEST, CANCEL_REQUEST = 80877103, 80877104, 80877102
#: Client frames that the server must answer: Query, Sync, password, copy done or failed,
#: function call, terminate.
ENDS_REQUEST = frozenset(b"QSpcfFX")
#: Server frames after which it is the client's turn: ReadyForQuery, authentication, copy in.
ENDS_ANSWER = frozenset(b"ZRG")
NOTIFICATION = ord("A")
AUTHENTICATED = b"R\x00\x00\x00\x08\x00\x00\x00\x00"


@dataclass(frozen=True, slots=True)
class Frame:
    """One protocol message: its type byte (0 for the first of a link) and all its bytes."""

    kind: int
    data: bytes


@dataclass(slots=True)
class Frames:
    """Splits a stream of bytes into frames. A client's first frame has no type."""

    starts_untyped: bool = False
    _buffer: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that `data` completes."""
        self._buffer += data
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

    def _next(self) -> Frame | None:
        head = 0 if self.starts_untyped else 1
        if len(self._buffer) < head + 4:
            return None
        size = head + int.from_bytes(self._buffer[head : head + 4])
        if len(self._buffer) < size:
            return None
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        if not self.starts_untyped:
            return Frame(data[0], data)
        self.starts_untyped = int.from_bytes(data[4:8]) in (SSL_REQUEST, GSS_REQUEST)
        return Frame(0, data)


@dataclass(slots=True)
class Requests:
    """Gathers a client's frames into requests, and gives each one's text in SQL."""

    _frames: list[Frame] = field(default_factory=list)
    _prepared: dict[bytes, str] = field(default_factory=dict)

    def add(self, frame: Frame) -> Request | None:
        """Return the request that `frame` ends, if it ends one."""
        self._frames.append(frame)
        if frame.kind and frame.kind not in ENDS_REQUEST:
            return None
        frames, self._frames = self._frames, []
        texts = [text for each in frames if (text := self._text(each))]
        return Request(b"".join(each.data for each in frames), frame.kind, "; ".join(texts))

    def _text(self, frame: Frame) -> str:
        body = frame.data[5:]
        if frame.kind == ord("Q"):
            return _sql(body.partition(b"\0")[0])
        if frame.kind == ord("P"):
            name, _, rest = body.partition(b"\0")
            self._prepared[name] = _sql(rest.partition(b"\0")[0])
        elif frame.kind == ord("B"):
            name = body.partition(b"\0")[2].partition(b"\0")[0]
            return self._prepared.get(name, "?")
        return {0: "(connects)", ord("p"): "(password)", ord("X"): "(leaves)"}.get(frame.kind, "")


@dataclass(frozen=True, slots=True)
class Request:
    """A client's frames up to its wait: the bytes, the last frame's type, the SQL."""

    data: bytes
    kind: int
    text: str

    def __str__(self) -> str:
        return self.text


def _sql(text: bytes) -> str:
    return " ".join(text.decode(errors="replace").split())
