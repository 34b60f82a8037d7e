"""The output of the commands at a terminal: names, tables, and readers that leave."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from io import StringIO

import pytest
from django.conf import settings
from django.core import checks
from django.core.management import CommandError, call_command
from django.db import connection
from django.db.models.functions import Now

from django_mq import handler, queues
from django_mq.management.arguments import login
from django_mq.management.screen import CLEAR, HOME
from django_mq.models import FailedAttempt, HandledMessage, WorkerCommand
from tests.acceptance.conftest import database_url
from tests.management.conftest import rows, run, run_json
from tests.queues.pooler import Pooler
from tests.rows import add, beat, decide, tally
from tests.slow import slow
from tests.waiting import until

pytestmark = pytest.mark.django_db

#: Types answers at a simulated terminal; returns the questions.
Terminal = Callable[..., list[str]]

MANAGE = [sys.executable, str(settings.BASE_DIR / "manage.py")]


class TestNamesOfQueues:
    """All commands agree: `--queue` names queues; QUEUE is short for it."""

    @pytest.mark.parametrize("name", [("mail",), ("--queue", "mail")])
    def test_both_spellings(self, name: tuple[str, ...]) -> None:
        message = add()
        run("mq_pause", *name)
        run("mq_limit", *name, 5)
        assert (queues.state("mail").paused, queues.counts("mail").max_in_flight) == (True, 5)
        run("mq_resume", *name)
        assert not queues.state("mail").paused
        assert str(message.pk) in rows(run("mq_peek", *name))
        assert "mail" in rows(run("mq_status", *name))

    def test_twice_or_never(self) -> None:
        with pytest.raises(CommandError, match="name the queue once"):
            run("mq_pause", "mail", "--queue", "mail")
        with pytest.raises(CommandError, match="name a queue"):
            run("mq_pause")

    def test_did_you_mean(self) -> None:
        add()
        err = StringIO()
        call_command("mq_status", "mial", stdout=StringIO(), stderr=err, no_color=True)
        assert "did you mean 'mail'?" in err.getvalue()
        call_command("mq_status", "mail", stdout=StringIO(), stderr=(err := StringIO()))
        assert not err.getvalue()


class TestNothingToPeek:
    def test_where_messages_are(self) -> None:
        assert run("mq_peek") == "No messages.\n"
        add()
        add("other", dead=-1)
        assert run("mq_peek", "empty").endswith("There are messages in: mail 1.\n")
        text = run("mq_peek", "mial")
        assert "did you mean 'mail'? There are messages in" in text
        assert run("mq_peek", "mail", "--dead").endswith("There are dead letters in: other 1.\n")


class TestStop:
    def test_nothing_to_stop_is_reported_without_a_question(self) -> None:
        assert run("mq_stop", "99").endswith("nothing to stop.\n")
        assert run_json("mq_stop", "99") == {"ids": [], "skipped": 1, "dry_run": False}
        message = add(leased=60)
        with pytest.raises(CommandError, match=r"its process ends, .* lose .* Pass --yes"):
            run("mq_stop", message.pk)

    def test_messages_that_no_worker_has_need_no_question(self, terminal: Terminal) -> None:
        questions = terminal()
        ids = [add().pk, add(dead=-1).pk]
        assert run("mq_stop", *ids, *ids).endswith("nothing to stop.\n")
        assert run_json("mq_stop", *ids, *ids)["skipped"] == 2
        assert not questions

    def test_ids_that_do_not_run_get_a_note(self, capsys: pytest.CaptureFixture[str]) -> None:
        beat("worker")
        leased, waiting = add(leased=60), add()
        run("mq_stop", leased.pk, waiting.pk, 10**9, "--yes")
        assert capsys.readouterr().err.splitlines() == [
            f"Note: message {waiting.pk} is processable, not running or leased: see mq_why"
            f" {waiting.pk}",
            "Note: message 1000000000 is not stored: see mq_why 1000000000",
        ]

    @pytest.mark.parametrize(("options", "by"), [((), login()), (("--by", "ana"), "ana")])
    def test_name_of_the_operator_is_stored(self, options: tuple[str, ...], by: str) -> None:
        beat("worker")
        message = add(leased=60)
        text = run("mq_stop", message.pk, message.pk, "--yes", *options)
        assert text == "Asked the workers to stop 1 message.\n"
        assert [each.asked_by for each in WorkerCommand.objects.all()] == [by]


class TestReplay:
    @pytest.mark.parametrize("text", ["1h", "1.5h", "999999999.999999999d", "2026-11-24T10:00"])
    def test_since_takes_a_moment_or_a_duration(self, text: str) -> None:
        handler("t", queue="mail", name="h")(print)
        HandledMessage.objects.create(
            id=1, queue="mail", type="t", payload={}, metadata={}, keep_until=Now()
        )
        found = run("mq_replay", "--since", text, "--to", "h", "--dry-run")
        assert found == "Would replay 1 message.\n"
        with pytest.raises(CommandError, match="no duration such as 1h"):
            run("mq_replay", "--since", "long ago", "--dry-run")


class TestStatus:
    def test_one_queue(self) -> None:
        handler("a.b", queue="mail", name="h")(print)
        handler("a.b", queue="other", name="i")(lambda delivery: None)
        add()
        add("other")
        beat("mails", queues=["mail"], timings={"h": tally(acked=1), "i": tally(acked=1)})
        beat("others", queues=["other"])
        text = run("mq_status", "--queue", "mail")
        assert "mails" in text
        assert "other" not in text
        told = run_json("mq_status", "--queue", "mail")
        assert [each["queue"] for each in told["queues"]] == ["mail"]
        assert [each["handler"] for each in told["handlers"]] == ["h"]

    def test_a_pooler_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with Pooler(connection.get_connection_params()) as pooler:
            monkeypatch.setitem(connection.settings_dict, "HOST", "127.0.0.1")
            monkeypatch.setitem(connection.settings_dict, "PORT", pooler.port)
            assert "connects through a pooler" in run("mq_status")
            [text] = run_json("mq_status")["warnings"]
            assert "'default' connects through a pooler" in text

    def test_it_needs_no_second_session(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The server may have no connection left to find out whether there is a pooler."""
        monkeypatch.setitem(connection.settings_dict, "HOST", "127.0.0.1")
        monkeypatch.setitem(connection.settings_dict, "PORT", 1)
        assert run_json("mq_status")["warnings"] == []

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("0", r"at least 0\.1 seconds"),
            ("0.05", r"at least 0\.1 seconds"),
            ("999999d", "at most one day"),
        ],
    )
    def test_watch_pauses_between_two_looks(self, text: str, words: str) -> None:
        with pytest.raises(CommandError, match=words):
            run("mq_status", "--watch", text)

    def test_messages_without_a_handler_that_did_nothing_have_no_row(self) -> None:
        beat("a", timings={"": tally(), "h": tally()})
        found = rows(run("mq_status"))
        assert "h" in found
        assert "-" not in found

    def test_watch_takes_no_json(self) -> None:
        with pytest.raises(CommandError, match="--watch cannot be combined"):
            run("mq_status", "--watch", "--json")


@pytest.mark.django_db(transaction=True)
def test_a_pooler_is_found_by_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> list[str]:
        run = checks.run_checks(tags=["database"], databases=["default"])
        return [str(each.id) for each in run if str(each.id).startswith("django_mq")]

    assert found() == []
    with Pooler(connection.get_connection_params()) as pooler:
        monkeypatch.setitem(connection.settings_dict, "HOST", "127.0.0.1")
        monkeypatch.setitem(connection.settings_dict, "PORT", pooler.port)
        connection.close()
        assert found() == ["django_mq.W007"]
        monkeypatch.setitem(connection.settings_dict, "DISABLE_SERVER_SIDE_CURSORS", True)
        assert found() == []
        connection.close()


@pytest.mark.django_db(transaction=True)
def test_check_reports_that_it_could_not_look_for_a_pooler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of the other checks are not lost with the connection."""
    monkeypatch.setitem(connection.settings_dict, "HOST", "127.0.0.1")
    monkeypatch.setitem(connection.settings_dict, "PORT", 1)
    connection.close()
    found = checks.run_checks(tags=["database"], databases=["default"])
    [unknown] = [each.msg for each in found if each.id == "django_mq.W007"]
    assert unknown.startswith("Cannot find out")
    assert not unknown.endswith("."), "the server's text may end with a question"


@pytest.mark.django_db(transaction=True)
class TestProcesses:
    """Real processes, started as users start them."""

    environment = property(lambda self: {**os.environ, "DATABASE_URL": database_url()})

    def watched(self, *arguments: str, lines: int = 0, columns: int = 0) -> list[str]:
        """Return two screens of `mq_status --watch` in a terminal of this size; 0 is unknown."""
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        watching = subprocess.Popen(
            [*MANAGE, "mq_status", *arguments, "--watch", "0.1"],
            env=self.environment,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        said = bytearray()

        def shown_twice() -> bool:
            said.extend(os.read(ours, 65536))
            return said.count(HOME.encode()) > 6

        try:
            until(shown_twice, "two screens")
            watching.send_signal(signal.SIGINT)
            assert watching.wait(60) == 0
        finally:
            watching.kill()
            os.close(ours)
        text = said.decode()
        assert "Traceback" not in text
        assert text.startswith(CLEAR)
        screens = [each for each in text.split(HOME) if "QUEUE" in each]
        return screens[:2]

    @pytest.mark.slow
    def test_closed_stdin_gets_no_question(self) -> None:
        """Some supervisors close it; the interpreter then has None in its place."""
        add("mail", dead=-1)
        for command, code, said in (
            ("mq_pause mail", 0, "Queue mail is paused until mq_resume"),
            ("mq_pause unknown", 1, "Pass --force to change it anyway."),
            ("mq_purge --all", 1, "Pass --yes to confirm."),
        ):
            ended = subprocess.run(
                ["sh", "-c", f"exec {' '.join(MANAGE)} {command} <&-"],
                env=self.environment,
                capture_output=True,
                text=True,
            )
            assert (ended.returncode, said in ended.stdout + ended.stderr) == (code, True), ended

    def test_characters_that_the_terminal_lacks_are_escaped(self) -> None:
        """Keys and error texts may have any, and a terminal that is not UTF-8 has 256 of them."""
        text = "zażółć \U0001f4a5"
        FailedAttempt.objects.create(
            message_id=7, queue="mail", type="t", attempt=1, error_class="E", error_text=text
        )
        ended = subprocess.run(
            [*MANAGE, "mq_errors"],
            env={**self.environment, "PYTHONIOENCODING": "cp1250"},
            capture_output=True,
        )
        assert (ended.returncode, ended.stderr) == (0, b"")
        assert "zażółć \\U0001f4a5" in ended.stdout.decode("cp1250")

    @pytest.mark.slow
    @pytest.mark.parametrize("columns", [40, *slow(80, 200)])
    def test_the_texts_of_errors_fit_the_terminal(self, columns: int) -> None:
        text = "the card was declined by its bank " * 9
        FailedAttempt.objects.create(
            message_id=7, queue="mail", type="t", attempt=1, error_class="E", error_text=text
        )
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        arguments = [*MANAGE, "mq_errors"]
        subprocess.run(arguments, env=self.environment, stdout=theirs, check=True)
        os.close(theirs)
        said = os.read(ours, 65536).decode()
        os.close(ours)
        [line] = [line for line in said.splitlines() if "the card" in line]
        assert columns - 3 < len(line) <= columns

    @pytest.mark.slow
    def test_watch_at_a_terminal(self) -> None:
        """It clears the screen each time, and Ctrl-C ends it without a traceback."""
        for text in self.watched():
            assert text.startswith("\x1b[2J")
            assert re.search(r"QUEUE +STATE", text)
            assert "No worker is known" in text

    @pytest.mark.slow
    def test_watch_names_a_queue_that_is_unknown(self) -> None:
        add("mail", after=-30)
        for text in self.watched("mial"):
            assert "did you mean 'mail'?" in text
        for text in self.watched("mail"):
            assert "Note:" not in text

    @pytest.mark.slow
    def test_watch_never_scrolls(self) -> None:
        for n in range(30):
            add(f"queue-{n}", dead=-1)
        first, second = self.watched(lines=20, columns=100)
        assert "\x1b[2J" not in second  # a terminal keeps what this clears, to scroll back
        for text in (first.removeprefix("\x1b[2J"), second):
            lines = text.split("\r\n")
            assert len(lines) <= 20  # the last one is empty: the cursor is there
            assert max(map(len, lines)) <= 100
            assert re.search(r" \d+ of \d+ rows hidden: the terminal has 20 lines$", lines[0])
            assert "No worker is known" in text
            more = re.search(r"^\.\.\. and (\d+) more$", "\n".join(lines), re.MULTILINE)
            assert more is not None
            assert f" {more[1]} of " in lines[0]

    @pytest.mark.parametrize(("lines", "columns"), [(24, 80), *slow((24, 130))])
    def test_watch_shows_the_queues_that_need_someone(self, lines: int, columns: int) -> None:
        """The last by name stands still; eleven empty ones and the handlers are hidden first."""
        for n in range(11):
            decide(f"empty-{n}", max_in_flight=5)
        add("slow", after=-30)
        add("late", after=-3600)
        head = add("z-stopped", key="k", dead=-1)
        add("z-stopped", key="k", blocked_by=head.pk, after=-1)
        beat("a", timings={f"handler-{n}": tally(acked=1) for n in range(7)})
        for screen in self.watched(lines=lines, columns=columns):
            text = screen.replace("\r\n", "\n")
            assert re.search(r" \d+ of \d+ rows hidden", text)
            named = re.findall(r"^(?:slow|late|z-stopped|empty-\d+)\b", text, re.MULTILINE)
            assert named[:3] == ["z-stopped", "late", "slow"]
            assert re.search(r"^\.\.\. and .*7 handlers$", text, re.MULTILINE)
