"""Failed attempts in groups, and actions on the messages of a group."""

from __future__ import annotations

import json
from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.db.models.functions import Now

from django_mq import queues
from django_mq.messages import Fence
from django_mq.models import FailedAttempt, QueuedMessage
from django_mq.store import claim_lapsed, error_groups, settle
from tests.rows import add

pytestmark = pytest.mark.django_db


def fail(message, attempt=1, ago=0.0, **given):
    """Record a failed attempt of `message`."""
    given = {"error_class": "ValueError", "handler": "h", "place": "shop.mail:send", **given}
    made = FailedAttempt.objects.create(
        message_id=message.pk, queue=message.queue, type=message.type, attempt=attempt, **given
    )
    FailedAttempt.objects.filter(pk=made.pk).update(ended_at=Now() - timedelta(seconds=ago))
    made.refresh_from_db()
    return made


def test_groups_have_the_class_handler_and_place_the_last_failed_first():
    first = fail(add(dead=-1), ago=500)
    newest = fail(add("other"), ago=100)
    same = [fail(add(), ago=200, error_text="another text")]
    others = [
        fail(add(), ago=50, error_class="KeyError"),
        fail(add(), ago=40, handler="i"),
        fail(add(), ago=30, place="shop.mail:render"),
    ]
    assert {each.fingerprint for each in same} == {first.fingerprint} == {newest.fingerprint}
    found = queues.errors()
    assert [each.fingerprint for each in found] == [
        *(each.fingerprint for each in reversed(others)),
        first.fingerprint,
    ]
    group = found[-1]
    assert (group.error_class, group.handler, group.place) == ("ValueError", "h", "shop.mail:send")
    assert (group.queues, group.count, group.is_exact) == (("mail", "other"), 3, True)
    assert (group.attempt_id, group.message_id) == (newest.pk, newest.message_id)
    assert (group.first, group.last) == (first.ended_at, newest.ended_at)
    assert (group.dead, group.waiting) == (1, 2)


def test_one_group_by_its_fingerprint():
    wanted = [fail(add("other")), fail(add(dead=-1))]
    fail(add(), handler="i")
    (group,) = queues.errors(fingerprint=wanted[0].fingerprint)
    assert (group.handler, group.count, group.queues) == ("h", 2, ("mail", "other"))
    (mail,) = queues.errors(queue="mail", fingerprint=group.fingerprint)
    assert mail.count == 1
    assert queues.errors(fingerprint="0" * 16) == []
    with pytest.raises(ValueError, match="fingerprint"):
        queues.errors(fingerprint="no such")


def test_many_groups_share_the_messages_that_are_looked_up(monkeypatch):
    """Fifty groups of 1,000 messages took 0.8 s."""
    monkeypatch.setattr(error_groups, "MAX_EXAMINED", 6)
    for n in range(3):
        fail(add(dead=-1), ago=n)
    assert [(each.dead, each.is_exact) for each in queues.errors()] == [(3, True)]
    fail(add(), handler="i", ago=9)
    fail(add(), handler="j", ago=9)
    first = queues.errors()[0]
    assert (first.count, first.dead, first.is_exact) == (3, 2, False)
    call_command("mq_errors", stdout=(out := StringIO()))
    assert out.getvalue().splitlines()[1].split()[1:4] == ["3", "2+", "0+"]


def test_a_limit_counts_groups_however_many_queues_they_have():
    """Each group is complete, and appears on exactly one of the pages."""
    for n in range(5):
        for queue in ("mail", "other", "third"):
            fail(add(queue), ago=10 * n + 1, error_class=f"Error{n}")
    pages = [queues.errors(limit=2, offset=offset) for offset in (0, 2, 4, 6)]
    assert [[(each.error_class, each.count) for each in page] for page in pages] == [
        [("Error0", 3), ("Error1", 3)],
        [("Error2", 3), ("Error3", 3)],
        [("Error4", 3)],
        [],
    ]
    with pytest.raises(ValueError, match="offset"):
        queues.errors(offset=-1)


def test_they_are_narrowed_to_a_time_and_queues():
    fail(add(), ago=500), fail(add("other"), ago=5), fail(add("third"), ago=5, handler="i")
    assert [each.count for each in queues.errors(60)] == [1, 1]
    assert [each.count for each in queues.errors(timedelta(hours=1), "mail")] == [1]
    assert [each.queues for each in queues.errors(queue=["mail", "other"])] == [("mail", "other")]
    assert len(queues.errors(limit=1)) == 1
    for bad in ({"since": -1}, {"limit": 0}, {"fingerprint": "x"}, {"queue": "a b"}):
        with pytest.raises(ValueError, match=r"."):
            queues.errors(**bad)


def test_a_time_before_all_messages_finds_all_of_them():
    fail(add())
    assert len(queues.errors(since=timedelta(days=4000 * 365))) == 1


def test_a_message_counts_where_it_failed_last():
    message = add(dead=-1)
    old = fail(message, 1, ago=9)
    new = fail(message, 2, ago=8, error_class="KeyError")
    groups = {each.fingerprint: each for each in queues.errors()}
    assert [groups[each.fingerprint].dead for each in (old, new)] == [0, 1]
    assert not queues.requeue(fingerprint=old.fingerprint)
    assert queues.requeue(fingerprint=new.fingerprint).ids == (message.pk,)


def test_every_way_to_fail_without_a_traceback_has_a_fingerprint(transactional_db):
    """This includes the take-over of a lapsed lease, whose statement involves no Python."""
    lapsed = [add(leased=-1, attempts=1, handler="h") for _ in range(2)]
    failed = add(leased=60, attempts=1, handler="h")
    with connection.cursor() as cursor:
        driver = cursor.connection.cursor()
        claim_lapsed.claim_lapsed(
            driver, queues=["mail"], claimer="w:2", lease=9, limit=9, max_bytes=9999
        )
        row = settle.FailedDelivery(
            Fence(failed.pk, 1, "worker:1"), None, 0, "", "WorkerVanished", "text", "", "e", 1
        )
        assert settle.fail(driver, [row]) == {failed.pk}
    prints = {each.message_id: each.fingerprint for each in FailedAttempt.objects.all()}
    assert set(prints) == {failed.pk, *(each.pk for each in lapsed)}
    assert len(set(prints.values())) == 1  # it has a class and a handler, but no text


@pytest.mark.parametrize("odd", ["\\", "\\x00", "é\u202e", "%s", ""])
def test_odd_texts_have_one_too(odd):
    made = fail(add(), error_class=odd, place=f"{odd}:{odd}", handler="")
    assert len(made.fingerprint) == 16
    assert queues.errors()[0].place == f"{odd}:{odd}"


def test_every_action_takes_a_fingerprint():
    def two(**given):
        mine, other = add(**given), add(**given)
        made = fail(mine, error_class=f"E{mine.pk}")
        fail(other)
        return mine.pk, made.fingerprint

    for action, given in (
        (queues.cancel, {}),
        (queues.run_now, {"after": 60}),
        (queues.discard, {"dead": -1}),
        (queues.requeue, {"dead": -1}),
        (queues.purge, {"dead": -1}),
    ):
        mine, fingerprint = two(**given)
        assert action(fingerprint=fingerprint).ids == (mine,)
    waiting, dead = add(), add(dead=-1)
    for message in (waiting, dead):
        same = fail(message, error_class="KeyError")
    # A waiting message is not a dead letter, so `discard()` neither removes nor skips it.
    assert queues.discard(fingerprint=same.fingerprint) == queues.Changed((dead.pk,), 0)
    for action in (queues.cancel, queues.run_now, queues.discard):
        with pytest.raises(ValueError, match="by ids or by fingerprint"):
            action()
        with pytest.raises(ValueError, match="not both"):
            action([1], fingerprint="0" * 16)


def test_the_command_shows_the_last_message_and_the_first_line_of_its_error():
    """At most 200 bytes of it where the output is no terminal; in JSON the whole line."""
    fail(add(), error_text="older", ago=9)
    newest = fail(add(), error_text="\n no \x1b[2Jseats\nfor 2")
    fail(add(), error_class="KeyError", error_text="k" * 999, ago=20)
    fail(add(), error_class="OSError", error_text="", ago=30)
    call_command("mq_errors", stdout=(out := StringIO()))
    headers, first, error, text, second, _, long, third, last, *_ = out.getvalue().splitlines()
    assert headers.split()[4:] == ["LAST", "MESSAGE"]
    assert first.endswith(f" UTC {newest.message_id:8}")
    assert error == "    ValueError in handler h, at shop.mail:send"
    assert text == "    no \ufffd[2Jseats"
    assert (long[:5], len(long.encode())) == ("    k", 200)
    assert last == "    OSError in handler h, at shop.mail:send"
    assert max(map(len, (headers, first, second, third))) <= 80
    call_command("mq_errors", "--json", stdout=(out := StringIO()))
    first, *_ = json.loads(out.getvalue())
    assert first["text"] == "no \x1b[2Jseats"


def test_the_commands_take_a_fingerprint():
    mine, other = add(dead=-1), add(dead=-1)
    made = fail(mine, error_class="KeyError")
    fail(other)
    out = StringIO()
    call_command("mq_errors", "--json", "--since", "1h", stdout=out)
    assert {each["fingerprint"] for each in json.loads(out.getvalue())} >= {made.fingerprint}
    out = StringIO()
    call_command("mq_errors", stdout=out)
    assert made.fingerprint in out.getvalue()
    call_command("mq_requeue", "--fingerprint", made.fingerprint, "--yes", stdout=StringIO())
    assert QueuedMessage.objects.dead().get() == other
    call_command(
        "mq_purge", "--fingerprint", queues.errors()[0].fingerprint, "--yes", stdout=StringIO()
    )
    assert QueuedMessage.objects.get() == mine
    with pytest.raises(CommandError, match="not a fingerprint: mq_errors"):
        call_command("mq_requeue", "--fingerprint", "x", "--yes")
