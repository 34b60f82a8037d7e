"""The identity of an incoming message, and its dead letters; without a broker."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, connections, transaction
from django.db.models.functions import Now

from django_mq import queues
from django_mq.conf import get_settings
from django_mq.contrib.relays import relay
from django_mq.contrib.relays.consumer import Consumer
from django_mq.contrib.relays.incoming import Incoming, Undecodable
from django_mq.contrib.relays.testing import receive
from django_mq.models import QueuedMessage, UniqueKey
from django_mq.testing import drain
from tests.database import second_connection, until_any_blocked
from tests.roles import acting_as, make_role
from tests.rows import add, the_message

pytestmark = pytest.mark.django_db(transaction=True)

INBOX = {"kind": "amqp", "url": "amqp://x", "source": "q"}


@pytest.fixture
def inbox(settings: Any) -> Any:
    """Give the inbox `crm` further options."""

    def give(**options: Any) -> None:
        settings.DJANGO_MQ = {"INBOXES": {"crm": {**INBOX, **options}}}

    give()
    return give


def event(**attributes: str) -> dict[str, str]:
    return {f"ce-{name}": value for name, value in attributes.items()}


@pytest.mark.usefixtures("inbox")
def test_events_of_two_sources_may_have_one_id() -> None:
    assert receive("crm", id="5", headers=event(id="5", source="/eu"))
    assert receive("crm", id="5", headers=event(id="5", source="/us"))
    assert not receive("crm", id="5", headers=event(id="5", source="/eu"))
    assert QueuedMessage.objects.count() == 2


@pytest.mark.usefixtures("inbox")
def test_an_event_that_a_broker_has_twice_is_one_message() -> None:
    """As after a relay was killed before it knew that a Redis stream has its message."""
    assert receive("crm", id="1-0", headers=event(id="5", source="/eu"))
    assert not receive("crm", id="2-0", headers=event(id="5", source="/eu"))


@pytest.mark.usefixtures("inbox")
def test_a_structured_event_too() -> None:
    document = {"specversion": "1.0", "id": "5", "source": "/eu", "type": "t", "data": 1}
    structured = {"content_type": "application/cloudevents+json"}
    assert receive("crm", document, id="a", **structured)
    assert not receive("crm", document, id="b", **structured)


@pytest.mark.usefixtures("inbox")
def test_an_id_that_a_relay_gives_again_after_a_restore_is_another_event() -> None:
    times = ["2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"]
    for time in times:
        headers = event(id="5", source="/eu", time=time, schemaversion="1")
        assert receive("crm", id="5", headers=headers)
        assert not receive("crm", id="5", headers=headers)


@pytest.mark.usefixtures("inbox")
def test_a_source_with_a_fragment_is_another_source() -> None:
    assert receive("crm", headers=event(id="5", source="/shop#eu"))
    assert receive("crm", headers=event(id="eu#5", source="/shop"))
    assert receive("crm", headers=event(id="5", source="/shop%2523eu"))


@pytest.mark.usefixtures("inbox")
def test_a_structured_event_whose_id_is_a_number_has_that_id() -> None:
    """The specification wants a text; by the ids of the broker, two services would collide."""
    structured = {"content_type": "application/cloudevents+json"}
    assert receive("crm", {"id": 5, "source": "/eu"}, id="5", **structured)
    assert receive("crm", {"id": 5, "source": "/us"}, id="5", **structured)
    assert not receive("crm", {"id": 5, "source": "/us"}, id="6", **structured)
    assert not receive("crm", id="7", headers=event(id="5", source="/us"))


@pytest.mark.parametrize("attributes", [{"id": "5"}, {"source": "/eu"}, {"id": "", "source": "/"}])
@pytest.mark.usefixtures("inbox")
def test_without_a_source_and_an_id_the_broker_decides(attributes: dict[str, str]) -> None:
    assert receive("crm", id="m1", headers=event(**attributes))
    assert the_message().unique_id == "crm:m1"
    UniqueKey.objects.all().delete()
    with pytest.raises(Undecodable, match="no message_id"):
        receive("crm", id=None, headers=event(**attributes))


def test_a_callable_has_the_id_of_the_broker(inbox: Any) -> None:
    inbox(id=lambda raw: raw.id)
    receive("crm", id="m1", headers=event(id="5", source="/eu"))
    assert the_message().unique_id == "crm:m1"


def test_an_empty_id_of_a_callable_is_refused_as_its_own(inbox: Any) -> None:
    """Not for want of a message_id, which the message may have."""
    inbox(id=lambda message: message.headers.get("order", ""))
    with pytest.raises(Undecodable, match=r"^the inbox's 'id' returned an empty text$"):
        receive("crm", id="5")
    inbox()
    with pytest.raises(Undecodable, match=r"^it has no message_id: set the inbox's 'id' to 'hash'"):
        receive("crm", id=None)


def test_a_relay_passes_on_versions_that_no_handler_here_understands() -> None:
    relay("#", to="events")
    add("relay.events", type="a.b", handler="relay.events", schema_version=7)
    with pytest.raises(Exception, match="DJANGO_MQ"):  # it is tried: settings have no `events`
        drain("relay.events")


def test_refused_message_between_good_ones_costs_few_savepoints(settings: Any) -> None:
    """PostgreSQL caches 64 for each transaction: one per message would be more."""
    settings.DJANGO_MQ = {"INBOXES": {"crm": INBOX}, "MAX_PAYLOAD_BYTES": 100}
    bodies = [b'{"n": %d}' % n for n in range(100)]
    bodies[41] = b'"%s"' % (b"x" * 200)
    before = connection.savepoint_state
    Consumer("crm", get_settings().inboxes["crm"]).store(
        [Incoming(body, {}, "application/json", f"m{n}") for n, body in enumerate(bodies)]
    )
    assert connection.savepoint_state - before <= 64
    assert QueuedMessage.objects.filter(dead_at=None).count() == 99
    assert "PayloadTooLarge" in QueuedMessage.objects.dead().get().dead_reason


class TestDeadLetters:
    @pytest.fixture(autouse=True)
    def letters(self, inbox: Any) -> None:
        """Two orders without an id, and one body that is not JSON."""
        inbox(id=lambda raw: "")
        for body in (b'{"n": 1}', b"{", b'{"n": 2}'):
            self.consume(body)

    def consume(self, body: bytes) -> None:
        raw = Incoming(body, {"tenant": "ä"}, "application/json", None, key="k")
        Consumer("crm", get_settings().inboxes["crm"]).store([raw])

    def test_they_are_broadcast_by_corrected_settings(
        self, inbox: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        inbox(id="hash", type="crm.order")
        call_command("mq_consume", "crm", "--dead")
        assert capsys.readouterr().out == (
            "2 messages were stored. Dead letters that are left: 1.\n"
        )
        first, second = QueuedMessage.objects.filter(dead_at=None).order_by("pk")
        assert (first.payload, second.payload) == ({"n": 1}, {"n": 2})
        assert (first.type, first.key, first.metadata["mq.inbox"]) == ("crm.order", "k", "crm")
        assert first.metadata["headers"] == {"tenant": "ä"}
        assert "not JSON" in QueuedMessage.objects.dead().get().dead_reason

    def test_the_log_names_those_that_were_replaced(
        self, inbox: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        letters = list(QueuedMessage.objects.dead().order_by("pk").values_list("pk", flat=True))
        inbox(id="hash")
        call_command("mq_consume", "crm", "--dead")
        [line] = [each for each in caplog.records if vars(each).get("event") == "inbox_repaired"]
        assert vars(line)["message_ids"] == [letters[0], letters[2]]

    @pytest.mark.parametrize("option", ["--until-empty", "--health-port=8081"])
    def test_options_of_a_consumer_are_refused(self, option: str) -> None:
        with pytest.raises(CommandError, match="--dead ends by itself"):
            call_command("mq_consume", "crm", "--dead", option)

    def test_they_stay_as_they_are_while_nothing_is_corrected(self) -> None:
        before = list(QueuedMessage.objects.order_by("pk").values())
        call_command("mq_consume", "crm", "--dead")
        assert list(QueuedMessage.objects.order_by("pk").values()) == before

    def test_dead_letter_redelivered_meanwhile_is_dropped(
        self, inbox: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        inbox(id="hash")
        self.consume(b'{"n": 2}')
        call_command("mq_consume", "crm", "--dead")
        assert capsys.readouterr().out == (
            "1 message was stored, 1 dropped that came before. Dead letters that are left: 1.\n"
        )

    def test_dead_letters_over_the_limit_are_unchanged(
        self, inbox: Any, settings: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        inbox(id="hash")
        settings.DJANGO_MQ = {**settings.DJANGO_MQ, "MAX_PAYLOAD_BYTES": 5}
        before = list(QueuedMessage.objects.order_by("pk").values())
        call_command("mq_consume", "crm", "--dead")
        assert list(QueuedMessage.objects.order_by("pk").values()) == before
        assert capsys.readouterr().out == (
            "0 messages were stored. Dead letters that are left: 3.\n"
        )

    def test_dead_message_without_a_handler_is_not_counted(
        self, inbox: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        inbox(id="hash")
        receive("crm", {"n": 0})
        QueuedMessage.objects.filter(dead_at=None).update(dead_at=Now())
        call_command("mq_consume", "crm", "--dead")
        assert "left: 1." in capsys.readouterr().out

    def test_a_letter_that_was_requeued_and_died_is_broadcast(self, inbox: Any) -> None:
        queues.requeue(QueuedMessage.objects.values_list("pk", flat=True))
        QueuedMessage.objects.update(dead_at=Now(), dead_reason="held for too long")
        inbox(id="hash")
        call_command("mq_consume", "crm", "--dead")
        assert QueuedMessage.objects.filter(dead_at=None).count() == 2

    def test_second_command_waits_for_the_broadcast_of_the_first(self, inbox: Any) -> None:
        """If it went on with later letters, those would be handled first."""
        inbox(id="hash")
        first = QueuedMessage.objects.order_by("pk")[0]
        with second_connection() as other, other.transaction():
            other.execute(
                "select from django_mq_queuedmessage where id = %s for update", [first.pk]
            )
            thread = threading.Thread(target=self.broadcast_again, daemon=True)
            thread.start()
            until_any_blocked()
            assert QueuedMessage.objects.filter(dead_at=None).count() == 0
        thread.join(60)
        assert QueuedMessage.objects.filter(dead_at=None).count() == 2

    def broadcast_again(self) -> None:
        try:
            call_command("mq_consume", "crm", "--dead")
        finally:
            connections.close_all()

    def test_full_queue_is_reported_without_a_traceback(self, inbox: Any, settings: Any) -> None:
        inbox(id="hash")
        settings.DJANGO_MQ = {**settings.DJANGO_MQ, "QUEUES": {"default": {"max_backlog": 1}}}
        receive("crm", {"n": 0})
        with pytest.raises(CommandError, match="max_backlog"):
            call_command("mq_consume", "crm", "--dead")
        assert QueuedMessage.objects.dead().count() == 3

    def test_missing_right_to_delete_is_reported_without_a_traceback(self, inbox: Any) -> None:
        inbox(id="hash")
        with transaction.atomic():
            may_look = "grant select, update on all tables in schema public to {role}"
            role = make_role("looker", may_look)
            told = pytest.raises(CommandError, match=r"permission denied.*the role mq_worker")
            with told, acting_as(role):
                call_command("mq_consume", "crm", "--dead")
            transaction.set_rollback(True)

    def test_dead_letter_with_an_edited_payload_stays_dead(self, inbox: Any) -> None:
        letter = QueuedMessage.objects.order_by("pk")[0]
        for payload in ([], {"raw": "é"}, {"raw": ""}, {**letter.payload, "headers": 5}):
            QueuedMessage.objects.filter(pk=letter.pk).update(payload=payload)
            inbox(id="hash")
            call_command("mq_consume", "crm", "--dead")
            assert QueuedMessage.objects.dead().filter(pk=letter.pk).exists()

    def test_the_advice_names_the_command(self) -> None:
        letter = QueuedMessage.objects.dead().order_by("pk")[0]
        assert "mq_consume crm --dead" in str(queues.why(letter.pk))


@pytest.mark.usefixtures("inbox")
def test_received_messages_are_handled_in_a_test() -> None:
    with pytest.raises(Undecodable, match="not JSON"):
        receive("crm", b"{")
    with pytest.raises(KeyError):
        receive("nope")
    assert receive("crm", {"n": 1})
    assert the_message().payload == {"n": 1}


@pytest.mark.usefixtures("inbox")
def test_messages_of_a_test_have_different_ids_unless_it_gives_them() -> None:
    assert receive("crm", {"n": 1})
    assert receive("crm", {"n": 2})
    assert receive("crm", {"n": 3}, id="a")
    assert not receive("crm", {"n": 4}, id="a")


@pytest.mark.usefixtures("inbox")
def test_receive_raises_for_a_payload_over_the_limit(settings: Any) -> None:
    settings.DJANGO_MQ = {**settings.DJANGO_MQ, "MAX_PAYLOAD_BYTES": 5}
    with pytest.raises(Undecodable, match="at most 5"):
        receive("crm", {"n": 12345})
    assert not QueuedMessage.objects.exists()
