"""mq_peek: rows, payloads on request, and no output that moves a cursor."""

from __future__ import annotations

import json

import pytest
from django.db import connection

from django_mq.store import peek
from tests.database import second_connection
from tests.management.conftest import rows, run, run_json
from tests.rows import add

pytestmark = pytest.mark.django_db

# As a worker, which passes the rows that another session has locked.
ACK = """
delete from django_mq_queuedmessage
 where id in (select id from django_mq_queuedmessage for update skip locked)
"""


class TestPeek:
    def test_rows_without_payload(self):
        """S12: no command shows a secret in a payload unless asked."""
        message = add(payload={"to": "canary"}, metadata={"m": "canary"}, last_error="canary")
        text = run("mq_peek") + run("mq_peek", "--json")
        assert "canary" not in text
        assert rows(text)[str(message.pk)][:7] == [
            str(message.pk),
            "mail",
            "shop.orders.placed",
            "-",
            "-",
            "processable",
            "0/20",
        ]

    def test_payload_when_asked_for_with_secrets_covered(self, settings):
        payload = {"to": "ann", "user": [{"API_key": "canary", "deep": {"passwd_x": ["canary"]}}]}
        add(payload=payload, metadata={"password": "canary", "tier": "gold"})
        settings.DJANGO_MQ = {"REDACT": "API|PASS"}
        text = run("mq_peek", "--payload")
        assert "ann" in text
        assert "gold" in text
        assert "canary" not in text
        [row] = run_json("mq_peek", "--payload")
        assert row["payload"]["to"] == "ann"
        assert "canary" not in json.dumps(row)
        settings.DJANGO_MQ = {"REDACT": None}
        assert "canary" in run("mq_peek", "--payload")

    def test_secrets_are_covered_by_default(self):
        add(payload={"nested": [{"password": "canary"}]})
        assert "canary" not in run("mq_peek", "--payload")

    def test_the_order_key_is_no_secret(self):
        add(key="customer-7", metadata={"ce_partitionkey": "customer-7"})
        assert run("mq_peek", "--payload").count("customer-7") == 2

    @pytest.mark.django_db(transaction=True)
    @pytest.mark.parametrize("options", [(), ("--payload",), ("--payload", "--skip-locked")])
    def test_a_message_that_a_worker_ends_meanwhile_is_shown(self, monkeypatch, options):
        """A busy queue seemed empty, and with --payload the command ended with DoesNotExist."""
        message = add(payload={"to": "ann"})
        find = peek.peek

        def find_and_ack(*args, **kwargs):
            found = find(*args, **kwargs)
            with second_connection() as worker:
                worker.execute(ACK)
            return found

        monkeypatch.setattr(peek, "peek", find_and_ack)
        text = run("mq_peek", "mail", *options)
        assert str(message.pk) in rows(text)
        assert ("ann" in text) is bool(options)

    def test_a_payload_moves_no_cursor(self):
        """S30."""
        add(payload={"a": "\x1b[2J\n\u202e"}, last_error="\x1b]0;title\x07")
        text = run("mq_peek", "--payload")
        assert not {"\x1b", "\x07", "\u202e"} & set(text)

    def test_options_queue_limit_and_skip_locked(self):
        leased, first, _ = add(leased=60), add(), add()
        add("other")
        found = run_json("mq_peek", "mail", "--limit", 2)
        assert [row["id"] for row in found] == [leased.pk, first.pk]
        found = run_json("mq_peek", "mail", "--limit", 1, "--skip-locked")
        assert [row["id"] for row in found] == [first.pk]

    def test_all_queues_by_id(self):
        """Not one queue after the other; a full list says that there may be more."""
        first, second, third = add("mail"), add("audit"), add("mail")
        found = run_json("mq_peek")
        assert [row["id"] for row in found] == [first.pk, second.pk, third.pk]
        assert "see --limit" not in run("mq_peek")
        assert run("mq_peek", "--limit", 2).endswith("There may be more: see --limit.\n")

    def test_dead_letters(self):
        dead = add(dead=-1)
        assert run("mq_peek") == (
            "No messages. There are dead letters in mail: see mq_peek --dead.\n"
        )
        assert rows(run("mq_peek", "--dead"))[str(dead.pk)][5] == "dead"

    def test_undecodable_payload_is_marked(self):
        message = add()
        with connection.cursor() as cursor:
            cursor.execute("set local max_stack_depth = '6MB'")
            cursor.execute(
                "update django_mq_queuedmessage set payload = %s::jsonb",
                ["[" * 10_000 + "]" * 10_000],
            )
        assert str(message.pk) in run("mq_peek")
        assert "payload: (cannot be decoded)" in run("mq_peek", "--payload")
