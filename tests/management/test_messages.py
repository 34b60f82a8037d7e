"""mq_requeue, mq_run_now and mq_purge: the chosen messages, and the questions first."""

from __future__ import annotations

import pytest
from django.core.management import CommandError

from django_mq import queues
from django_mq.management.selection import notes_on_others
from django_mq.models import QueuedMessage
from django_mq.states import MessageState
from tests.management.conftest import run, run_json
from tests.rows import add

pytestmark = pytest.mark.django_db


class TestRequeue:
    def test_ids_need_no_question(self):
        dead, waiting, other = add(dead=-1), add(), add(dead=-1)
        text = run("mq_requeue", "--id", dead.pk, waiting.pk)
        assert text == (
            "Requeued 1 message, skipped 1 (in flight, changed, or of a unique id that is taken).\n"
        )
        assert (dead.state, other.state) == ("processable", "dead")

    def test_ids_that_are_not_dead_get_a_note(self, capsys):
        held, running = add(held=-60, after=30), add(leased=60)
        assert run("mq_requeue", "--id", held.pk, 10**9) == "Nothing was requeued.\n"
        assert capsys.readouterr().err.splitlines() == [
            f"Note: message {held.pk} is held, not dead: see mq_why {held.pk}",
            "Note: message 1000000000 is not stored: see mq_why 1000000000",
        ]
        run("mq_requeue", "--id", add(dead=-1).pk, running.pk)
        [note] = capsys.readouterr().err.splitlines()
        assert note.startswith(f"Note: message {running.pk} is leased, not dead")
        run("mq_requeue", "--id", add(dead=-1).pk)
        assert capsys.readouterr().err == ""

    def test_the_note_names_a_database_that_is_not_the_usual_one(self, capsys, settings):
        settings.DJANGO_MQ = {"DATABASE": "elsewhere"}
        run("mq_requeue", "--id", 10**9, "--database", "default")
        assert capsys.readouterr().err.endswith("see mq_why 1000000000 --database default\n")

    def test_json_counts_those_that_are_skipped(self):
        assert run_json("mq_requeue", "--id", add().pk, 10**9)["skipped"] == 2

    def test_at_most_ten_ids_get_a_note(self, capsys):
        run("mq_requeue", "--id", *range(10**9, 10**9 + 11))
        assert len(capsys.readouterr().err.splitlines()) == 10

    def test_one_that_died_after_it_was_looked_for_needs_no_note(self):
        assert (
            list(notes_on_others([add(dead=-1).pk], queues.Changed(()), None, [MessageState.DEAD]))
            == []
        )

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

    def test_dead_letters_that_a_limit_picked_are_named(self):
        """After an incident one is tried first, and `mq_why` wants to know which it was."""
        later, first = add(dead=-1), add(dead=-2)
        choice = ["--all", "--limit"]
        assert (
            run("mq_requeue", *choice, 1, "--dry-run") == f"Would requeue 1 message ({first.pk}).\n"
        )
        assert run("mq_requeue", *choice, 1, "--yes") == f"Requeued 1 message ({first.pk}).\n"
        ids = [later.pk, *(add(dead=-1).pk for _ in range(10))]
        ten = run("mq_requeue", *choice, 10, "--dry-run")
        assert ten == f"Would requeue 10 messages ({', '.join(map(str, ids[:10]))}).\n"
        assert run("mq_requeue", *choice, 11, "--dry-run") == "Would requeue 11 messages.\n"

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
        assert run("mq_requeue", "--all") == (
            "Nothing was requeued: no dead letter matches; for those that wait, see mq_run_now.\n"
        )

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
    def test_missing_selection_is_refused(self, arguments):
        with pytest.raises(CommandError, match="--all"):
            run("mq_requeue", *arguments, "--yes")


class TestRunNow:
    def test_delayed_retrying_and_held_messages_become_due(self):
        delayed = add(after=60)
        retrying = add(after=60, attempts=2)
        held = add(held=-60, after=60)
        due, dead, leased = add(), add(dead=-1), add(leased=60)
        expired = add(after=60, expires=-1)
        text = run("mq_run_now", "--queue", "mail", "--yes")
        assert text == "Made due 3 messages.\n"
        waited = [delayed, retrying, held]
        assert [each.state for each in waited] == ["processable"] * 3
        others = [due, dead, leased, expired]
        assert [each.state for each in others] == ["processable", "dead", "leased", "expired"]

    def test_ids_need_no_question(self, capsys):
        delayed, due, other = add(after=60), add(), add(after=60)
        text = run("mq_run_now", "--id", delayed.pk, due.pk)
        assert text == (
            "Made due 1 message, skipped 1 (due, in flight, dead, expired, or behind another"
            " message of their key).\n"
        )
        assert capsys.readouterr().err == (
            f"Note: message {due.pk} is processable, not delayed, retrying or held:"
            f" see mq_why {due.pk}\n"
        )
        assert (delayed.state, other.state) == ("processable", "delayed")

    @pytest.mark.parametrize(
        "choice", [["--queue", "mail"], ["--type", "a"], ["--handler", "h"], ["--key", "k"]]
    )
    def test_several_need_a_yes(self, choice):
        chosen = add(after=60, type="a", handler="h", key="k")
        others = add("other", after=60, type="b", handler="g", key="l")
        with pytest.raises(CommandError, match=r"Run 1 message now\? Pass --yes"):
            run("mq_run_now", *choice)
        assert chosen.state == "delayed"
        run("mq_run_now", *choice, "--yes")
        assert (chosen.state, others.state) == ("processable", "delayed")

    def test_at_most_the_first(self):
        later, sooner = add(after=60), add("other", after=30)
        told = run_json("mq_run_now", "--type", later.type, "--limit", "1", "--yes")
        assert told == {"ids": [sooner.pk], "skipped": 0, "dry_run": False}
        assert later.state == "delayed"

    def test_dry_run(self):
        delayed, due = add(after=60), add()
        assert run("mq_run_now", "--queue", "mail", "--dry-run") == "Would make due 1 message.\n"
        told = run_json("mq_run_now", "--id", delayed.pk, due.pk, "--dry-run")
        assert told == {"ids": [delayed.pk], "skipped": 1, "dry_run": True}
        assert delayed.state == "delayed"

    def test_nothing_to_do(self):
        """After an incident all messages of a fingerprint may be dead."""
        add(dead=-1)
        none = ": nothing that waits for a time matches; for dead ones, mq_requeue.\n"
        assert run("mq_run_now", "--queue", "mail") == f"Nothing was made due{none}"
        assert run("mq_run_now", "--queue", "mail", "--dry-run").endswith(none)


class TestPurge:
    def test_it_asks_with_the_count(self, terminal):
        """S34: prints counts, needs --yes or an answer, touches only dead letters."""
        add(dead=-1)
        add(dead=-1)
        waiting = add()
        questions = terminal("n", "")
        assert run("mq_purge", "--queue", "mail") == "Nothing was removed.\n"
        assert run("mq_purge", "--queue", "mail") == "Nothing was removed.\n"
        assert questions == ["Remove 2 dead letters permanently? [y/N] "] * 2
        assert QueuedMessage.objects.count() == 3
        terminal("y")
        assert run("mq_purge", "--queue", "mail") == "Removed 2 messages.\n"
        assert QueuedMessage.objects.get() == waiting

    def test_different_messages_are_listed_before_the_question(self, terminal):
        """Another error than the one that the operator had in mind, and messages that wait."""
        add(dead=-1, type="shop.a", handler="h", last_error="KeyError: 'vat'")
        add(dead=-1, type="shop.a", handler="h", last_error="KeyError: 'rate'")
        add(dead=-1, type="shop.a", handler="h", last_error="ValueError: secret")
        add(type="shop.a", handler="h", last_error="customer jane@example.com is away")
        terminal("n")
        text = run("mq_purge", "--queue", "mail")
        assert text.splitlines() == [
            "COUNT  STATE  QUEUE  TYPE    HANDLER  LAST ERROR",
            "    2  dead   mail   shop.a  h        KeyError",
            "    1  dead   mail   shop.a  h        ValueError",
            "Nothing was removed.",
        ]
        text = run("mq_purge", "--queue", "mail", "--waiting", "--dry-run")
        assert "    1  waiting  mail   shop.a  h        -\n" in text
        assert text.endswith("Would remove 4 messages.\n")
        assert len(run_json("mq_purge", "--queue", "mail", "--dry-run")["ids"]) == 3
        assert run("mq_purge", "--queue", "mail", "--yes") == "Removed 3 messages.\n"

    def test_a_flood_that_waits_needs_an_option(self):
        add()
        assert run("mq_purge", "--queue", "mail", "--yes") == (
            "Nothing was removed: no dead letter matches; --waiting also removes those that wait.\n"
        )
        assert run("mq_purge", "--queue", "none", "--waiting") == "Nothing was removed.\n"

    def test_ids_that_are_not_dead_get_a_note(self, capsys):
        waiting = add(after=60)
        assert run("mq_purge", "--id", waiting.pk, "--yes") == "Nothing was removed.\n"
        note = f"Note: message {waiting.pk} is delayed, not dead: see mq_why {waiting.pk}\n"
        assert capsys.readouterr().err == note
        assert "Removed 1 message" in run("mq_purge", "--id", waiting.pk, "--waiting", "--yes")
        assert capsys.readouterr().err == ""

    def test_without_a_terminal_it_refuses(self):
        add(dead=-1)
        with pytest.raises(CommandError, match=r"Remove 1 dead letter permanently\? Pass --yes"):
            run("mq_purge", "--all")
        assert QueuedMessage.objects.count() == 1

    def test_dry_run(self):
        add(dead=-1)
        assert run("mq_purge", "--all", "--dry-run", "--yes") == "Would remove 1 message.\n"
        assert QueuedMessage.objects.count() == 1

    def test_json(self, terminal):
        """S34: no question is asked, so --yes is required."""
        dead = add(dead=-1)
        told = {"ids": [dead.pk], "skipped": 0, "dry_run": True}
        assert run_json("mq_purge", "--all", "--dry-run") == told
        terminal("y")
        with pytest.raises(CommandError, match="Pass --yes"):
            run_json("mq_purge", "--all")
        assert QueuedMessage.objects.count() == 1
        assert run_json("mq_purge", "--all", "--yes") == {**told, "dry_run": False}
        assert run_json("mq_purge", "--all") == {"ids": [], "skipped": 0, "dry_run": False}

    def test_waiting_messages_need_the_option(self):
        add()
        add(dead=-1)
        leased = add(leased=60)
        with pytest.raises(CommandError, match=r"3 messages permanently, dead or waiting\?"):
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

    def test_letters_that_died_during_the_question_stay(self, terminal, monkeypatch):
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
    def test_missing_selection_is_refused(self, arguments):
        with pytest.raises(CommandError, match="--all"):
            run("mq_purge", *arguments, "--yes")


@pytest.mark.parametrize("command", ["mq_requeue", "mq_run_now", "mq_purge"])
def test_a_preview_is_bounded(command):
    for number in range(11):
        column = {"after": 60} if command == "mq_run_now" else {"dead": -1}
        add(type=f"shop.t{number}", **column)
    lines = run(command, "--queue", "mail", "--dry-run").splitlines()
    assert len(lines) == 13
    assert lines[-2] == "(and smaller groups)"
    assert lines[-1].endswith(" 11 messages.")
