"""mq_status, mq_why and mq_routes: their output."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django.db.models.functions import Now
from django.utils.timezone import now

from django_mq import handlers, queues
from django_mq.models import WorkerHeartbeat
from tests.management.conftest import rows, run, run_json
from tests.rows import add, beat, decide, tally

pytestmark = pytest.mark.django_db


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
        state = [
            "mail",
            "processable",
            "8",
            "3",
            "1",
            "1",
            "1",
            "1",
            "1",
            "3",
            "1",
            "h",
            "1",
            "min",
        ]
        assert found["mail"] == state
        header = "STATE DEPTH PROCESSABLE IN FLIGHT DELAYED RETRYING HELD BLOCKED DEAD OLDEST"
        assert " ".join(found["QUEUE"][1:]) == header
        assert found["stopped"][1:3] == ["paused", "0"]
        assert found["later"][1:3] == ["paused", "until"]
        assert found["waiting"][1] == "waiting"
        assert found["default"][1] == "empty"

    @pytest.mark.parametrize("failed", [{"dead": -1}, {"after": 60, "attempts": 1}])
    def test_failures_lead_to_their_errors(self, failed):
        """Not all: a letter that expired, or was held for too long, has no failed attempt."""
        add()
        assert "mq_errors" not in run("mq_status")
        add(**failed)
        assert (
            "Messages are dead or retried: mq_errors groups failed attempts, mq_peek --dead lists"
            " dead letters."
        ) in run("mq_status")
        assert "mq_errors" not in run("mq_status", "other")

    def test_the_commands_name_the_database_if_they_need_to(self, settings):
        settings.DJANGO_MQ = {"DATABASE": "elsewhere"}
        add(dead=-1)
        text = run("mq_status", "--database", "default")
        for command in ("mq_errors", "mq_peek --dead"):
            assert f"{command} --database default " in text

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
        """NSQ-27: the number in flight, and the limit."""
        settings.DJANGO_MQ = {"QUEUES": {"configured": {"max_in_flight": 1200}}}
        decide(max_in_flight=2)
        decide("held", max_in_flight=0)
        decide("line", owner="abcdef0123456789", owned_until=Now() + timedelta(seconds=9))
        decide("orphan", owner="dead", owned_until=Now() - timedelta(seconds=9))
        add(leased=60)
        text = run("mq_status")
        found = rows(text)
        assert found["mail"][1:3] + found["mail"][5:6] == ["in", "flight", "1/2"]
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

    def test_state_of_a_queue_without_due_messages(self):
        """It does not wait while its message runs, and a held message needs somebody."""
        add("running", leased=60)
        add("held", held=-9, after=60)
        add("some", held=-9, after=60)
        add("some", after=60)
        add("later", after=60)
        dead = add("stuck", key="a", dead=-5)
        add("stuck", key="a", blocked_by=dead.pk)
        lines = run("mq_status").split("\n\n")[0].splitlines()
        states = {line.split()[0]: line for line in lines}
        wanted = {"running": "in flight", "held": "held", "some": "waiting, partly held"}
        wanted |= {"stuck": f"behind dead message {dead.pk}", "later": "waiting"}
        for queue, state in wanted.items():
            assert f"  {state}  " in states[queue]

    def test_workers(self):
        started = now() - timedelta(hours=2, minutes=3)
        mail = {"queues": ["mail", "shop.*"], "running": [1, 2]}
        beat("a" * 32, host="web1", pid=41, started_at=started, threads=8, threads_used=2.0, **mail)
        beat("b" * 32, host="web2", pid=42, wakeup="degraded", draining=True, seen=-5)
        beat("c" * 32, host="web3", pid=43, wakeup="poll", seen=-90)
        beat("d" * 32, host="web4", pid=44, queues=["#"])  # as mq_worker without --queue
        found = rows(run("mq_status"))
        assert re.fullmatch(
            r"aaaaaaaa web1 41 alive mail shop\.\* 2 25% notify 2 h 3 min \d+ s ago",
            " ".join(found["aaaaaaaa"]),
        )
        assert found["bbbbbbbb"][3:8] == ["draining", "all", "0", "-", "degraded"]
        assert found["dddddddd"][3:6] == ["alive", "all", "0"]
        assert found["cccccccc"][3] == "gone"
        assert re.search(r" 1 min \d+ s ago$", " ".join(found["cccccccc"]))

    def test_handlers(self):
        """CAR-42: the figures of all live workers, added up."""
        counts = {"acked": 1200, "retried": 2, "snoozed": 7}
        beat("a", timings={"mail": tally(**counts, waited=[0.5], ran=[0.002] * 3)})
        beat("b", timings={"mail": tally(acked=34, failed=3, dead=1), "": tally(dead=4)})
        beat("c", timings={"mail": tally(acked=5)}, seen=-90)
        beat("d", timings={"mail": {"acked": "\x1b[2J"}, "\x1b[2J": tally(acked=9)})
        text = run("mq_status")
        assert "\x1b" not in text
        found = rows(text)
        header = ["HANDLER", "ACKED", "FAILED", "RETRIED", "SNOOZED", "DEAD", "WAITED", "P50"]
        assert found["HANDLER"] == [*header, "P99", "RAN", "P50", "P99"]
        assert found["mail"] == [
            "mail", "1,234", "3", "2", "7", "1", "500", "ms", "500", "ms", "2", "ms", "2", "ms",
        ]  # fmt: skip
        assert found["-"] == ["-", "0", "0", "0", "0", "4", "-", "-", "-", "-"]
        [none, _, mail] = run_json("mq_status")["handlers"]
        assert (none["handler"], none["dead"], none["ran"]) == ("", 4, None)
        assert (mail["handler"], mail["acked"], mail["ran"]["count"]) == ("mail", 1234, 3)
        assert mail["waited"]["mean"] == 0.5

    def test_no_worker(self):
        assert "No worker is known" in run("mq_status")

    def test_queues_that_no_worker_serves(self):
        """They are named, with what is told when there are more of them than fit a line."""
        told = "Messages wait that no live worker claims, in"
        add("mail")
        add("paused")
        decide("paused", paused=-1)
        assert told not in run("mq_status")  # no worker is known, which it says instead
        [warning] = run_json("mq_status")["warnings"]
        assert warning == f"{told} mail: mq_doctor says what to do."
        beat("a", queues=["mail"])
        assert told not in run("mq_status")
        assert run_json("mq_status")["warnings"] == []
        for columns in ({"draining": True}, {"quiet": True}, {"seen": -90}):
            WorkerHeartbeat.objects.all().delete()
            beat("a", queues=["mail"], **columns)
            assert f"{told} mail: mq_doctor" in run("mq_status")
            assert f"{told} mail: mq_doctor" in run("mq_status", "mail")
        for name in "bcdef":
            add(name)
        assert f"{told} b, c, d, e, f and 1 more: mq_doctor" in run("mq_status")

    def test_horizon_holders_are_listed(self, monkeypatch):
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
        beat("w", queues=["mail"], running=[3], threads=2, threads_used=1.5)
        found = run_json("mq_status")
        [mail] = (queue for queue in found["queues"] if queue["queue"] == "mail")
        assert (mail["dead"], mail["processable"], mail["capped"]) == (1, 1, [])
        assert 90 <= mail["oldest"] < 120
        [worker] = found["workers"]
        assert (worker["host"], worker["pid"], worker["running"]) == ("host", 7, [3])
        assert (worker["alive"], worker["wakeup"]) == (True, "notify")
        assert (worker["threads"], worker["threads_used"], worker["slots"]) == (2, 1.5, None)


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

    def test_routes_show_handler_queue_and_reason(self):
        found = rows(run("mq_routes", "shop.placed"))
        assert found["all"][1:4] == ["audit", "yes", "shop.#"]
        assert found["gold"][1:3] == ["default", "no"]
        found = rows(run("mq_routes", "shop.placed", "--metadata", '{"tier": "gold"}'))
        assert found["gold"][1:3] == ["default", "yes"]

    def test_type_without_a_handler(self):
        said = run("mq_routes", "other.type")
        assert "No handler registered here takes other.type (handlers are looked for in" in said

    def test_a_misspelt_type(self):
        handlers.handler("bank.moved", name="books")(lambda delivery: None)
        assert "takes bank.mooved (did you mean bank.moved? handlers" in run(
            "mq_routes", "bank.mooved"
        )
        handlers.handler("bank.*", name="auditor", where={"audit": True})(lambda delivery: None)
        said = run("mq_routes", "bank.mooved")
        assert "takes bank.mooved with this metadata: a message is stored once" in said

    def test_json(self):
        [first, second] = run_json("mq_routes", "shop.placed")
        assert (first["handler"], first["queue"], first["gets_it"]) == ("all", "audit", True)
        assert second["gets_it"] is False
