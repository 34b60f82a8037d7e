"""mq_pause, mq_resume and mq_limit: their changes and their output."""

from __future__ import annotations

import pytest
from django.core.management import CommandError

from django_mq import queues
from django_mq.models import QueueState
from tests.management.conftest import run, run_json
from tests.rows import add, decide

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _known(settings):
    settings.DJANGO_MQ = {"QUEUES": {"mail": {}}}


class TestQueuesThatNothingKnows:
    @pytest.mark.parametrize("command", ["mq_pause {}", "mq_resume {}", "mq_limit {} 5"])
    def test_they_need_force(self, command):
        name, *arguments = command.format("mial").split()
        for more in ([], ["--yes"], ["--json"], ["--dry-run"]):
            with pytest.raises(CommandError, match=r"Did you mean mail\? Pass --force"):
                run(name, *arguments, *more)
        assert not QueueState.objects.exists()
        assert "Queue mial" in run(name, *arguments, "--force")

    def test_all_that_are_like_it_are_named(self):
        add("mails")
        with pytest.raises(CommandError, match=r"Did you mean mail or mails\?"):
            run("mq_pause", "mai")

    def test_a_terminal_is_asked(self, terminal):
        questions = terminal("n", "y", "y")
        with pytest.raises(CommandError, match="nothing was changed"):
            run("mq_pause", "nosuch")
        assert not QueueState.objects.exists()
        assert "is paused" in run("mq_pause", "nosuch")
        assert "queue nosuch is not known" in questions[0]
        assert "Did you mean" not in questions[0]

    @pytest.mark.parametrize("option", ["--yes", "--json"])
    def test_a_terminal_is_not_asked_by_a_script(self, terminal, option):
        """Its --yes answers another question."""
        questions = terminal()
        run("mq_pause", "mail", option)
        with pytest.raises(CommandError, match="Pass --force"):
            run("mq_pause", "mial", option)
        assert not questions

    def test_messages_and_decisions_make_a_queue_known(self):
        add("letters"), decide("parcels", max_in_flight=3)
        assert "is paused" in run("mq_pause", "letters")
        assert "is paused" in run("mq_pause", "parcels")


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

    @pytest.mark.parametrize("options", [[], ["--backoff"]])
    def test_nothing_to_end_needs_no_question(self, terminal, options):
        questions = terminal()
        assert "was not" in run("mq_resume", "mail", *options)
        assert not questions

    def test_a_resume_leaves_it(self):
        decide(backoff_level=3, backoff=60, paused=-1)
        run("mq_resume", "mail")
        assert queues.state("mail").backoff_level == 3

    def test_the_one_that_is_left_is_named(self, capsys):
        run("mq_resume", "mail")
        run("mq_resume", "mail", "--backoff")
        assert capsys.readouterr().err == ""
        decide(backoff_level=3, backoff=60, paused=-1)
        run("mq_resume", "mail", "--backoff", "--dry-run")
        assert "is paused: mq_resume mail ends that" in capsys.readouterr().err
        run("mq_resume", "mail")
        run("mq_resume", "mail")
        said = capsys.readouterr().err
        assert said.count("is backing off: mq_resume mail --backoff ends that") == 2
        assert "paused" not in said

    def test_a_pause_whose_time_has_passed_is_not_left(self, capsys):
        decide(backoff_level=3, backoff=60, paused=-60, until=-1)
        run("mq_resume", "mail", "--backoff")
        assert capsys.readouterr().err == ""
        assert "was not paused" in run("mq_resume", "mail")

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
