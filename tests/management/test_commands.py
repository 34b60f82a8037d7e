"""The operator commands: their output, their questions, and their care with what is destructive."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.db.models.functions import Now

from django_mq import handlers, queues
from django_mq.models import QueuedMessage, QueueState
from tests.rows import add, beat, decide, tally

pytestmark = pytest.mark.django_db

COMMANDS = {
    "mq_status": [],
    "mq_why": ["1"],
    "mq_peek": [],
    "mq_pause": ["mail"],
    "mq_resume": ["mail"],
    "mq_limit": ["mail", "5"],
    "mq_requeue": ["--all", "--yes"],
    "mq_purge": ["--all", "--yes"],
}

AUDITED = """
create function pg_temp.audit() returns trigger language plpgsql as
$$ begin insert into audit_log values (old.id); return old; end $$;
create trigger audit before delete on django_mq_queuedmessage
   for each row execute function pg_temp.audit()
"""


@pytest.fixture(autouse=True)
def _no_handlers():
    with handlers.isolated():
        yield


@pytest.fixture
def terminal(monkeypatch):
    """Sit at a terminal and give these answers; returns the questions."""

    def sit(*answers):
        questions = []
        replies = iter(answers)

        def ask(question):
            questions.append(question)
            return next(replies)

        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        monkeypatch.setattr("builtins.input", ask)
        return questions

    return sit


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stdin", StringIO())


def run(name, *arguments):
    out = StringIO()
    call_command(name, *map(str, arguments), stdout=out, no_color=True)
    return out.getvalue()


def run_json(name, *arguments):
    text = run(name, *arguments, "--json")
    assert text.isascii()
    return json.loads(text)


def rows(text):
    """Return the lines of a table as lists of words, by the first word."""
    return {words[0]: words for line in text.splitlines() if (words := line.split())}


@pytest.mark.parametrize("name", COMMANDS)
def test_each_takes_a_database(name):
    assert run(name, *COMMANDS[name], "--database", "default")
    with pytest.raises(CommandError, match="DATABASES has no 'nowhere'; choose one of default"):
        run(name, *COMMANDS[name], "--database", "nowhere")
    with pytest.raises(CommandError, match="DATABASES has no ''; choose one of default"):
        run(name, *COMMANDS[name], "--database", "")  # a variable of a shell that is not set


@pytest.mark.parametrize("name", COMMANDS)
def test_each_refuses_another_kind_of_database(name, monkeypatch):
    monkeypatch.setattr(connection, "vendor", "sqlite")
    monkeypatch.setattr(connection, "display_name", "SQLite")
    with pytest.raises(CommandError, match="is SQLite; django_mq needs PostgreSQL"):
        run(name, *COMMANDS[name])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("mq_pause", ["no such name"]),
        ("mq_resume", ["no such name"]),
        ("mq_resume", ["no such name", "--backoff"]),
        ("mq_limit", ["no such name", "5"]),
        ("mq_limit", ["mail", "few"]),
        ("mq_limit", ["mail", "-1"]),
        ("mq_limit", ["mail", "\u0661"]),
        ("mq_limit", ["mail", "2147483648"]),
        ("mq_peek", ["no such name"]),
        ("mq_peek", ["--limit", "0"]),
        ("mq_purge", ["--queue", "no such name"]),
        ("mq_requeue", ["--type", "\x1b[2J"]),
        ("mq_requeue", ["--id", "0"]),
        ("mq_requeue", ["--id", "1", "--queue", "mail"]),
        ("mq_requeue", ["--all", "--attempts", "0"]),
        ("mq_routes", ["no such name"]),
        ("mq_routes", ["a", "--metadata", "[1]"]),
        ("mq_routes", ["a", "--metadata", "{"]),
        ("mq_pause", ["mail", "--until", "2020-01-01T00:00"]),
        ("mq_pause", ["mail", "--until", "tomorrow"]),
        ("mq_pause", ["mail", "--until", "2999-01-01T00:00", "--for", "5m"]),
    ],
)
def test_bad_input_is_a_command_error(name, arguments):
    with pytest.raises(CommandError) as caught:
        run(name, *arguments)
    assert caught.value.returncode == 1
    assert "\x1b" not in str(caught.value)


def test_a_table_of_somebody_else_is_not_ours():
    """A trigger of theirs lacks its table: to migrate would not help."""
    add(dead=-1)
    with connection.cursor() as cursor:
        cursor.execute(AUDITED)
    with pytest.raises(CommandError, match='relation "audit_log" does not exist'):
        run("mq_purge", "--all", "--yes")


class TestStatus:
    def test_queues(self):
        for columns in ({}, {}, {"after": 60}, {"after": 60, "attempts": 1}, {"held": -1}):
            add(**columns)
        for columns in ({"leased": 60}, {"dead": -1}, {"dead": -1}, {"dead": -1}):
            add(**columns)
        add(blocked_by=1, key="k")
        add(after=-3700)
        decide("later", paused=-1, until=3600)
        decide("stopped", paused=-1)
        add("waiting", after=60)
        found = rows(run("mq_status"))
        state = ["mail", "processable", "8", "3", "1", "1", "1", "1", "1", "3", "1h", "1m"]
        assert found["mail"] == state
        header = "STATE DEPTH PROCESSABLE IN FLIGHT DELAYED RETRYING HELD BLOCKED DEAD OLDEST"
        assert " ".join(found["QUEUE"][1:]) == header
        assert found["stopped"][1:3] == ["paused", "0"]
        assert found["later"][1:3] == ["paused", "until"]
        assert found["waiting"][1] == "waiting"
        assert found["default"][1] == "empty"

    def test_backing_off(self):
        decide(backoff=60, backoff_level=1)
        found = rows(run("mq_status"))["mail"]
        assert found[1:4] == ["backs", "off", "until"]
        assert "level 1" in " ".join(found)
        decide("probing", backoff=-1, backoff_level=3, probe_by="worker:1")
        assert "backs off and probes, level 3" in " ".join(rows(run("mq_status"))["probing"])
        found = {each["queue"]: each for each in run_json("mq_status")["queues"]}
        assert (found["mail"]["backoff_level"], found["probing"]["backoff_level"]) == (1, 3)
        assert found["mail"]["backoff_until"]

    def test_limits_and_owners(self, settings):
        """NSQ-27: in flight, and of how many."""
        settings.DJANGO_MQ = {"QUEUES": {"configured": {"max_in_flight": 1200}}}
        decide(max_in_flight=2)
        decide("held", max_in_flight=0)
        decide("line", owner="abcdef0123456789", owned_until=Now() + timedelta(seconds=9))
        decide("orphan", owner="dead", owned_until=Now() - timedelta(seconds=9))
        add(leased=60)
        text = run("mq_status")
        found = rows(text)
        assert found["mail"][4] == "1/2"
        assert " ".join(found["held"]).startswith("held held back by its limit 0 0 0/0 ")
        assert found["configured"][4] == "0/1,200"
        assert found["line"][1:5] == ["empty,", "owned", "by", "abcdef01"]
        assert "dead" not in text.split("WORKER")[0].replace("DEAD", "")
        queues = {each["queue"]: each for each in run_json("mq_status")["queues"]}
        assert (queues["mail"]["max_in_flight"], queues["mail"]["limited"]) == (2, True)
        assert (queues["configured"]["max_in_flight"], queues["configured"]["limited"]) == (
            1200, False
        )  # fmt: skip
        assert queues["line"]["owner"] == "abcdef0123456789"
        assert queues["orphan"]["owner"] is None

    def test_workers(self):
        beat("a" * 32, host="web1", pid=41, queues=["mail", "shop.*"], running=[1, 2])
        beat("b" * 32, host="web2", pid=42, wakeup="degraded", draining=True, seen=-5)
        beat("c" * 32, host="web3", pid=43, wakeup="poll", seen=-90)
        found = rows(run("mq_status"))
        first = ["aaaaaaaa", "web1", "41", "alive", "mail", "shop.*", "2", "notify", "0s", "ago"]
        assert found["aaaaaaaa"] == first
        assert found["bbbbbbbb"][3:7] == ["draining", "all", "0", "degraded"]
        assert found["cccccccc"][3] == "gone"
        assert found["cccccccc"][-3:] == ["1m", "30s", "ago"]

    def test_handlers(self):
        """CAR-42: what they did, added up over the workers that live."""
        beat("a", timings={"mail": tally(acked=1200, retried=2, waited=[0.5], ran=[0.002] * 3)})
        beat("b", timings={"mail": tally(acked=34, failed=3, dead=1), "": tally(dead=4)})
        beat("c", timings={"mail": tally(acked=5)}, seen=-90)
        beat("d", timings={"mail": {"acked": "\x1b[2J"}, "\x1b[2J": tally(acked=9)})
        text = run("mq_status")
        assert "\x1b" not in text
        found = rows(text)
        header = ["HANDLER", "ACKED", "FAILED", "RETRIED", "DEAD", "WAITED", "P50", "P99", "RAN"]
        assert found["HANDLER"] == [*header, "P50", "P99"]
        assert found["mail"] == [
            "mail", "1,234", "3", "2", "1", "500ms", "500ms", "2ms", "2ms",
        ]  # fmt: skip
        assert found["-"] == ["-", "0", "0", "0", "4", "-", "-", "-", "-"]
        [none, _, mail] = run_json("mq_status")["handlers"]
        assert (none["handler"], none["dead"], none["ran"]) == ("", 4, None)
        assert (mail["handler"], mail["acked"], mail["ran"]["count"]) == ("mail", 1234, 3)
        assert mail["waited"]["mean"] == 0.5

    def test_no_worker(self):
        assert "No worker is known" in run("mq_status")

    def test_who_holds_old_rows_back(self, monkeypatch):
        """Guarantee 19."""
        holder = queues.HorizonHolder("session", "77", "ann", "\x1b[2Jreport", "active", None)
        monkeypatch.setattr(queues, "horizon", lambda using: [holder])
        text = run("mq_status")
        assert "\x1b" not in text
        assert rows(text)["session"][:3] == ["session", "77", "ann"]
        assert run_json("mq_status")["horizon"][0]["name"] == "77"

    def test_json(self):
        add(dead=-1)
        add(after=-90)
        beat("w", queues=["mail"], running=[3])
        found = run_json("mq_status")
        [mail] = (queue for queue in found["queues"] if queue["queue"] == "mail")
        assert (mail["dead"], mail["processable"], mail["capped"]) == (1, 1, [])
        assert 90 <= mail["oldest"] < 120
        [worker] = found["workers"]
        assert (worker["host"], worker["pid"], worker["running"]) == ("host", 7, [3])
        assert (worker["alive"], worker["wakeup"]) == (True, "notify")


class TestWhy:
    def test_text(self):
        message = add(after=60, attempts=1, last_error="ValueError: no\x1b[2J\nsecond line")
        text = run("mq_why", message.pk)
        assert "failed attempt 1 of 20" in text
        assert "ValueError: no" in text
        assert "\x1b" not in text
        assert text.count("\n") == 1

    def test_gone(self):
        assert "is not stored" in run("mq_why", 10**9)

    def test_json(self):
        message = add(dead=-1, dead_reason="exhausted")
        found = run_json("mq_why", message.pk)
        assert (found["id"], found["state"]) == (message.pk, "dead")


class TestRoutes:
    @pytest.fixture(autouse=True)
    def _handlers(self, _no_handlers):
        handlers.handler("shop.#", name="all", queue="audit")(lambda delivery: None)
        handlers.handler("shop.*", name="gold", where={"tier": "gold"})(lambda delivery: None)

    def test_who_gets_it_where_and_why(self):
        found = rows(run("mq_routes", "shop.placed"))
        assert found["all"][1:4] == ["audit", "yes", "shop.#"]
        assert found["gold"][1:3] == ["default", "no"]
        found = rows(run("mq_routes", "shop.placed", "--metadata", '{"tier": "gold"}'))
        assert found["gold"][1:3] == ["default", "yes"]

    def test_nobody(self):
        assert "No handler registered here takes other.type" in run("mq_routes", "other.type")

    def test_json(self):
        [first, second] = run_json("mq_routes", "shop.placed")
        assert (first["handler"], first["queue"], first["gets_it"]) == ("all", "audit", True)
        assert second["gets_it"] is False


class TestPause:
    def test_for_good_and_back(self):
        assert "until mq_resume" in run("mq_pause", "mail")
        assert queues.state("mail").paused
        assert "is resumed" in run("mq_resume", "mail")
        assert not queues.state("mail").paused
        assert "was not paused" in run("mq_resume", "mail")

    def test_for_a_while(self):
        assert "is paused until 20" in run("mq_pause", "mail", "--for", "15m")
        decided = QueueState.objects.get()
        assert (decided.paused_until - decided.paused_at).total_seconds() == 900

    def test_until_a_moment(self):
        run("mq_pause", "mail", "--until", "2999-01-01T00:00Z")
        assert QueueState.objects.get().paused_until.isoformat() == "2999-01-01T00:00:00+00:00"

    def test_json(self):
        until = "2999-01-01T00:00:00+00:00"
        told = {"queue": "mail", "paused": True, "until": until, "dry_run": False}
        assert run_json("mq_pause", "mail", "--until", until) == told
        told = {"queue": "mail", "what": "pause", "ended": True, "dry_run": False}
        assert run_json("mq_resume", "mail") == told
        assert run_json("mq_resume", "mail") == {**told, "ended": False}

    def test_dry_run(self):
        assert "would be paused until mq_resume" in run("mq_pause", "mail", "--dry-run")
        assert run_json("mq_pause", "mail", "--dry-run")["dry_run"] is True
        with pytest.raises(CommandError, match="that time has passed"):
            run("mq_pause", "mail", "--until", "2020-01-01T00:00", "--dry-run")
        assert not QueueState.objects.exists()
        decide(paused=-1)
        assert "would be resumed" in run("mq_resume", "mail", "--dry-run")
        assert run_json("mq_resume", "mail", "--dry-run")["ended"] is True
        assert queues.state("mail").paused


class TestEndOfABackoff:
    def test_by_hand(self):
        decide(backoff_level=3, backoff=60, probe_by="worker:1", paused=-1)
        assert "was not" not in run("mq_resume", "mail", "--backoff")
        assert queues.state("mail").backoff_level == 0
        assert queues.state("mail").paused
        assert "was not backing off" in run("mq_resume", "mail", "--backoff")

    def test_a_resume_leaves_it(self):
        decide(backoff_level=3, backoff=60, paused=-1)
        run("mq_resume", "mail")
        assert queues.state("mail").backoff_level == 3

    def test_dry_run_and_json(self):
        decide(backoff_level=3, backoff=60)
        text = run("mq_resume", "mail", "--backoff", "--dry-run")
        assert text == "Queue mail would be back at its full rate.\n"
        told = {"queue": "mail", "what": "backoff", "ended": True, "dry_run": True}
        assert run_json("mq_resume", "mail", "--backoff", "--dry-run") == told
        assert queues.state("mail").backoff_level == 3


class TestLimit:
    """NSQ-23: changed while running."""

    def test_a_number_and_none(self, settings):
        assert "has at most 5 messages in flight" in run("mq_limit", "mail", 5)
        assert queues.counts("mail").max_in_flight == 5
        assert "at most 0 messages" in run("mq_limit", "mail", 0)
        assert "no limit" in run("mq_limit", "mail", "none")
        settings.DJANGO_MQ = {"QUEUES": {"mail": {"max_in_flight": 7}}}
        assert "at most 7 messages" in run("mq_limit", "mail", "none")

    def test_json_and_dry_run(self):
        told = {"queue": "mail", "max_in_flight": 5, "dry_run": True}
        assert run_json("mq_limit", "mail", 5, "--dry-run") == told
        assert "would have at most 1 message in flight" in run("mq_limit", "mail", 1, "--dry-run")
        assert not QueueState.objects.exists()
        assert run_json("mq_limit", "mail", 5) == {**told, "dry_run": False}
        assert QueueState.objects.get().max_in_flight == 5


@pytest.mark.parametrize(
    "arguments",
    [
        ("mq_pause", "mail"),
        ("mq_resume", "stopped"),
        ("mq_resume", "failing", "--backoff"),
        ("mq_limit", "mail", "5"),
    ],
)
def test_at_a_terminal_it_is_asked_what_a_script_is_not(terminal, arguments):
    """It can be undone, so a script needs no --yes."""
    decide("stopped", paused=-1)
    decide("failing", backoff_level=1, backoff=60)
    before = list(QueueState.objects.values())
    questions = terminal("n", "y")
    assert run(*arguments) == "Nothing was changed.\n"
    assert list(QueueState.objects.values()) == before
    run(*arguments)
    assert len(questions) == 2
    assert arguments[1] in questions[0]
    assert list(QueueState.objects.values()) != before
    QueueState.objects.all().delete()
    decide("stopped", paused=-1)
    decide("failing", backoff_level=1, backoff=60)
    before = list(QueueState.objects.values())
    run(*arguments, "--yes")
    assert len(questions) == 2
    assert list(QueueState.objects.values()) != before


class TestRequeue:
    def test_ids_need_no_question(self):
        dead, waiting, other = add(dead=-1), add(), add(dead=-1)
        text = run("mq_requeue", "--id", dead.pk, waiting.pk)
        assert text == "Requeued 1 message, skipped 1 (in flight or changed).\n"
        assert (dead.state, other.state) == ("processable", "dead")

    def test_more_attempts(self):
        dead = add(dead=-1, attempts=20)
        run("mq_requeue", "--id", dead.pk, "--attempts", 7)
        dead.refresh_from_db()
        assert dead.max_attempts == 27

    @pytest.mark.parametrize("choice", [["--queue", "mail"], ["--type", "a"], ["--all"]])
    def test_several_need_a_yes(self, choice):
        """S34."""
        message = add(dead=-1, type="a")
        with pytest.raises(CommandError, match=r"Requeue 1 message\? Pass --yes"):
            run("mq_requeue", *choice)
        assert message.state == "dead"
        assert run("mq_requeue", *choice, "--yes") == "Requeued 1 message.\n"
        assert message.state == "processable"

    def test_only_those_chosen(self):
        chosen, *others = add(dead=-1, type="a"), add(dead=-1), add("other", dead=-1, type="a")
        run("mq_requeue", "--queue", "mail", "--type", "a", "--yes")
        assert chosen.state == "processable"
        assert [each.state for each in others] == ["dead", "dead"]

    def test_dry_run(self):
        message = add(dead=-1)
        assert run("mq_requeue", "--all", "--dry-run") == "Would requeue 1 message.\n"
        assert message.state == "dead"

    def test_nothing_to_do_needs_no_answer(self):
        assert run("mq_requeue", "--all") == "Nothing was requeued.\n"

    def test_json(self):
        dead, waiting = add(dead=-1), add()
        told = {"ids": [dead.pk], "skipped": 1, "dry_run": True}
        ids = ("--id", dead.pk, waiting.pk)
        assert run_json("mq_requeue", *ids, "--dry-run") == told
        assert run_json("mq_requeue", *ids) == {**told, "dry_run": False}
        told = {"ids": [], "skipped": 0, "dry_run": False}
        assert run_json("mq_requeue", "--all") == told

    def test_json_asks_nothing_but_wants_a_yes(self, terminal):
        """S34."""
        dead = add(dead=-1)
        terminal("y")
        with pytest.raises(CommandError, match="Pass --yes"):
            run_json("mq_requeue", "--all")
        assert dead.state == "dead"
        assert run_json("mq_requeue", "--all", "--yes")["ids"] == [dead.pk]

    @pytest.mark.parametrize("arguments", [[], ["--limit", "5"], ["--all", "--queue", "mail"]])
    def test_what_is_meant_must_be_said(self, arguments):
        with pytest.raises(CommandError, match="--all"):
            run("mq_requeue", *arguments, "--yes")


class TestPurge:
    def test_it_asks_with_the_count(self, terminal):
        """S34: prints counts, needs --yes or an answer, touches dead letters only."""
        add(dead=-1)
        add(dead=-1)
        waiting = add()
        questions = terminal("n", "")
        assert run("mq_purge", "--queue", "mail") == "Nothing was removed.\n"
        assert run("mq_purge", "--queue", "mail") == "Nothing was removed.\n"
        assert questions == ["Remove 2 messages (dead letters) for good? [y/N] "] * 2
        assert QueuedMessage.objects.count() == 3
        terminal("y")
        assert run("mq_purge", "--queue", "mail") == "Removed 2 messages.\n"
        assert QueuedMessage.objects.get() == waiting

    def test_without_a_terminal_it_refuses(self):
        add(dead=-1)
        with pytest.raises(CommandError, match=r"Remove 1 message .* Pass --yes"):
            run("mq_purge", "--all")
        assert QueuedMessage.objects.count() == 1

    def test_dry_run(self):
        add(dead=-1)
        assert run("mq_purge", "--all", "--dry-run", "--yes") == "Would remove 1 message.\n"
        assert QueuedMessage.objects.count() == 1

    def test_json(self, terminal):
        """S34: nothing is asked, so --yes must be said."""
        dead = add(dead=-1)
        told = {"ids": [dead.pk], "skipped": 0, "dry_run": True}
        assert run_json("mq_purge", "--all", "--dry-run") == told
        terminal("y")
        with pytest.raises(CommandError, match="Pass --yes"):
            run_json("mq_purge", "--all")
        assert QueuedMessage.objects.count() == 1
        assert run_json("mq_purge", "--all", "--yes") == {**told, "dry_run": False}
        assert run_json("mq_purge", "--all") == {"ids": [], "skipped": 0, "dry_run": False}

    def test_what_waits_only_when_told(self):
        add()
        add(dead=-1)
        leased = add(leased=60)
        with pytest.raises(CommandError, match="waiting ones too"):
            run("mq_purge", "--all", "--waiting")
        text = run("mq_purge", "--all", "--waiting", "--yes")
        assert text == "Removed 2 messages, skipped 1 (in flight or changed).\n"
        assert QueuedMessage.objects.get() == leased

    def test_only_those_chosen(self):
        old = add(dead=-7200)
        kept = {add(dead=-60), add("other", dead=-7200), add(dead=-7200, type="b")}
        run(
            *("mq_purge", "--queue", "mail", "--type", old.type),
            *("--older-than", "1h", "--yes"),
        )
        assert set(QueuedMessage.objects.all()) == kept

    def test_not_what_died_while_the_question_was_read(self, terminal, monkeypatch):
        first = add(dead=-60)
        terminal("y")

        def answer(question):
            add(dead=-1)
            return "yes"

        monkeypatch.setattr("builtins.input", answer)
        run("mq_purge", "--all")
        assert not QueuedMessage.objects.filter(pk=first.pk).exists()
        assert QueuedMessage.objects.count() == 1

    @pytest.mark.parametrize(
        "arguments", [[], ["--older-than", "1h"], ["--waiting"], ["--all", "--type", "a"]]
    )
    def test_what_is_meant_must_be_said(self, arguments):
        with pytest.raises(CommandError, match="--all"):
            run("mq_purge", *arguments, "--yes")


class TestPeek:
    def test_rows_without_payload(self):
        """S12: a secret in a payload is shown by no command that was not asked."""
        message = add(payload={"to": "canary"}, metadata={"m": "canary"}, last_error="canary")
        text = run("mq_peek") + run("mq_peek", "--json")
        assert "canary" not in text
        assert rows(text)[str(message.pk)][:6] == [
            str(message.pk),
            "mail",
            "shop.orders.placed",
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

    def test_a_payload_moves_no_cursor(self):
        """S30."""
        add(payload={"a": "\x1b[2J\n\u202e"}, last_error="\x1b]0;title\x07")
        text = run("mq_peek", "--payload")
        assert not {"\x1b", "\x07", "\u202e"} & set(text)

    def test_a_queue_a_limit_and_what_is_free(self):
        leased, first, _ = add(leased=60), add(), add()
        add("other")
        found = run_json("mq_peek", "mail", "--limit", 2)
        assert [row["id"] for row in found] == [leased.pk, first.pk]
        found = run_json("mq_peek", "mail", "--limit", 1, "--skip-locked")
        assert [row["id"] for row in found] == [first.pk]

    def test_dead_letters(self):
        dead = add(dead=-1)
        assert run("mq_peek") == "No messages.\n"
        assert rows(run("mq_peek", "--dead"))[str(dead.pk)][4] == "dead"

    def test_what_cannot_be_decoded(self):
        message = add()
        with connection.cursor() as cursor:
            cursor.execute("set local max_stack_depth = '6MB'")
            cursor.execute(
                "update django_mq_queuedmessage set payload = %s::jsonb",
                ["[" * 10_000 + "]" * 10_000],
            )
        assert str(message.pk) in run("mq_peek")
        assert "payload: (cannot be decoded)" in run("mq_peek", "--payload")


class TestLines:
    """What others wait behind: seen, and let go."""

    def line(self, key="k", **columns):
        head = add(key=key, handler="h", **(columns or {"dead": -5, "attempts": 20}))
        return head, add(key=key, handler="h", blocked_by=head.pk)

    def test_status(self, settings):
        settings.DJANGO_MQ = {"QUEUES": {"line": {"ordered": True}}}
        head, _ = self.line("order/7")
        first = add("line", ordered=True, after=60)
        add("line", ordered=True)
        text = run("mq_status")
        assert "Others wait behind these" in text
        found = rows(text)
        assert found[str(head.pk)][:7] == [
            str(head.pk), "mail", "order/7", "h", "shop.orders.placed", "dead", "20/20",
        ]  # fmt: skip
        assert found[str(head.pk)][-1] == "1"
        assert found["line"][1:6] == ["waits", "for", "message", f"{first.pk},", "ordered"]
        answer = run_json("mq_status")
        assert [(each["id"], each["behind"]) for each in answer["heads"]] == [
            (head.pk, 1),
            (first.pk, 1),
        ]
        queues = {each["queue"]: each for each in answer["queues"]}
        assert (queues["mail"]["blocked_key"], queues["mail"]["head"]) == ("order/7", head.pk)
        assert (queues["line"]["ordered"], queues["line"]["head"]) == (True, first.pk)

    def test_status_shows_ten(self):
        heads = [self.line(f"k{n}")[0] for n in range(11)]
        text = run("mq_status")
        assert str(heads[9].pk) in rows(text)
        assert str(heads[10].pk) not in rows(text)
        assert "mq_peek --heads" in text
        assert len(run_json("mq_status")["heads"]) == 10

    def test_status_without_any(self):
        add(key="k")
        assert "Others wait" not in run("mq_status")
        assert run_json("mq_status")["heads"] == []

    def test_peek(self):
        head, follower = self.line()
        found = rows(run("mq_peek", "mail"))
        assert f"blocked, behind {head.pk}" in " ".join(found[str(follower.pk)])
        [row] = run_json("mq_peek", "mail")
        assert (row["key"], row["behind"]) == ("k", head.pk)

    def test_peek_at_heads(self):
        head, _ = self.line()
        self.line("other", after=60)
        add("other")
        assert rows(run("mq_peek", "mail", "--heads", "--limit", 1)).keys() == {
            "FIRST", str(head.pk),
        }  # fmt: skip
        assert [each["key"] for each in run_json("mq_peek", "--heads")] == ["k", "other"]
        assert (
            run("mq_peek", "other", "--heads")
            == "No messages wait behind a first message of their key or queue.\n"
        )
        for option in ("--dead", "--payload", "--skip-locked"):
            with pytest.raises(CommandError, match=f"cannot be combined with {option}"):
                run("mq_peek", "--heads", option)

    def test_why(self):
        head, follower = self.line()
        assert f"waits behind message {head.pk} of its key k" in run("mq_why", follower.pk)
        assert run_json("mq_why", follower.pk)["behind"] == head.pk

    def test_requeue_by_key(self):
        self.line("a"), self.line("b")
        assert run_json("mq_requeue", "--key", "a", "--dry-run")["ids"]
        assert "Requeued 1 message" in run("mq_requeue", "--key", "a", "--handler", "h", "--yes")
        assert QueuedMessage.objects.dead().get().key == "b"
        assert "Nothing" in run("mq_requeue", "--key", "b", "--handler", "x", "--yes")

    def test_purge_by_key_or_id_lets_the_others_go_on(self):
        (_, one), (head, two) = self.line("a"), self.line("b", after=60)
        assert "Removed 1 message" in run("mq_purge", "--key", "a", "--yes")
        assert "Nothing was removed" in run("mq_purge", "--id", head.pk, "--yes")
        assert QueuedMessage.objects.filter(pk=head.pk).exists()
        assert "Removed 1 message" in run("mq_purge", "--id", head.pk, "--waiting", "--yes")
        states = dict(QueuedMessage.objects.with_state().values_list("pk", "state"))
        assert states == {one.pk: "processable", two.pk: "processable"}

    def test_an_id_goes_with_no_other_choice(self):
        for options in (["--key", "k"], ["--limit", "1"], ["--older-than", "1d"]):
            with pytest.raises(CommandError, match="not both"):
                run("mq_purge", "--id", "1", *options, "--yes")
