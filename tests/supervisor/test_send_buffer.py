"""Requests to a child: whole lines or none, and no wait for a child that does not read."""

from __future__ import annotations

from django_mq.executor.scoreboard import Scoreboard
from django_mq.supervisor.link_lines import decode_dead
from django_mq.supervisor.process_slot import ProcessSlot
from tests.supervisor.links import dead, fill, linked


def test_a_child_that_does_not_read_costs_its_supervisor_no_time() -> None:
    """It is unreachable once its link and the buffer are full, and reachable when it reads."""
    slot = ProcessSlot(Scoreboard(1))
    with linked(slot) as theirs:
        assert slot.link is not None
        accepted = fill(slot)  # a send that waits would wait for ever
        assert accepted
        assert list(slot.recovering) == accepted
        assert not slot.send(dead(9999))

        heard = b""
        while heard.count(b"\n") < len(accepted):
            heard += theirs.recv(65536)
            slot.to_send.send(slot.link)
        assert [decode_dead(line).worker for line in heard.splitlines()] == accepted
        assert not slot.to_send
        assert slot.send(dead(9999, running=1))
        assert decode_dead(theirs.recv(65536)).worker == "w9999"


def test_a_new_process_gets_nothing_that_was_meant_for_the_last_one() -> None:
    slot = ProcessSlot(Scoreboard(1))
    with linked(slot):
        fill(slot)
    with linked(slot) as theirs:
        assert not slot.to_send
        assert slot.send(dead(1, running=1))
        assert decode_dead(theirs.recv(65536)).worker == "w1"


def test_a_request_to_a_process_that_has_just_died_is_kept_for_another() -> None:
    """The slot still counts it as asked; the supervisor passes it on when it reaps the process."""
    slot = ProcessSlot(Scoreboard(1))
    with linked(slot) as theirs:
        theirs.close()
        for number in range(3):
            slot.send(dead(number))
        assert not slot.to_send
        assert slot.read_link() is False
        assert "w0" in slot.recovering
