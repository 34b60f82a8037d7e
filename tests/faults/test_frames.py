"""Bytes of the wire protocol become frames and requests, however they are split."""

from __future__ import annotations

import pytest

from tests.faults.frames import SSL_REQUEST, Frames, Request, Requests


def frame(kind: str, body: bytes) -> bytes:
    return kind.encode() + (len(body) + 4).to_bytes(4) + body


def untyped(code: int, body: bytes = b"") -> bytes:
    return (len(body) + 8).to_bytes(4) + code.to_bytes(4) + body


START = untyped(196608, b"user\0me\0\0")
PREPARED = (
    frame("P", b"name\0select 1\0\0\0")
    + frame("B", b"\0name\0\0\0\0\0\0\0")
    + frame("E", b"\0\0\0\0\0")
    + frame("S", b"")
)
AGAIN = frame("B", b"\0name\0\0\0\0\0\0\0") + frame("E", b"\0\0\0\0\0") + frame("S", b"")
STREAM = START + frame("Q", b"begin;\n  select 2\0") + PREPARED + AGAIN + frame("X", b"")


def requests(stream: bytes, size: int) -> list[Request]:
    """Feed `stream` in pieces of `size` bytes, like a client's bytes."""
    frames, requests = Frames(starts_untyped=True), Requests()
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    found = [requests.add(frame) for piece in pieces for frame in frames.feed(piece)]
    return [request for request in found if request is not None]


@pytest.mark.parametrize("size", [1, 2, 7, 4096])
def test_a_request_is_what_a_client_sends_before_it_waits(size: int) -> None:
    found = requests(STREAM, size)
    texts = ["(connects)", "begin; select 2", "select 1", "select 1", "(leaves)"]
    assert [str(request) for request in found] == texts
    assert b"".join(request.data for request in found) == STREAM


def test_a_request_for_encryption_is_followed_by_the_real_start() -> None:
    found = requests(untyped(SSL_REQUEST) + STREAM, 3)
    assert [request.kind for request in found[:3]] == [0, 0, ord("Q")]


def test_frames_of_a_server_have_types_from_the_first() -> None:
    frames = Frames()
    assert frames.feed(frame("Z", b"I")[:4]) == []
    assert [each.kind for each in frames.feed(frame("Z", b"I")[4:])] == [ord("Z")]
