"""The section on logging in the reference: its table has every event, and its setting works."""

from __future__ import annotations

import json
import logging
import logging.config
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import transaction
from django.utils import timezone

from django_mq import RetryPolicy, broadcast, handler, queues
from django_mq.handlers import isolated
from django_mq.models import QueuedMessage
from django_mq.store.operations import Progress
from django_mq.testing import drain, due
from tests.docs.log_events import logged_events
from tests.docs.pages import DOCS
from tests.rows import add
from tests.test_docs import ROOT, snippets

MESSAGE_EVENTS = ("message_started", "message_acked", "message_retried", "message_dead")

ROW = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \| ([A-Z, ]+) \| [^|]+ \|$", re.MULTILINE)


def part(heading: str) -> str:
    """Return the text of the reference from `heading` to the next one."""
    text = (DOCS / "reference.md").read_text()
    found = re.search(rf"^{heading}$(.*?)^##", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def documented_names(heading: str) -> dict[str, set[str]]:
    """Return the names in the second column of a table, by those in the first."""
    rows = re.findall(r"^\| (`.+?) \| (`.+?) \|$", part(heading), re.MULTILINE)
    found: dict[str, set[str]] = {}
    for names, others in rows:
        for name in re.findall(r"`(\w+)`", names):
            assert name not in found, name
            found[name] = set(re.findall(r"`(\w+)`", others))
    return found


def documented_events() -> dict[str, set[str]]:
    """Return the levels of each event in the tables.

    As many levels as events in a row are in the order of the events; otherwise each event has all.
    """
    section = part("### Log events")
    rows = ROW.findall(section)
    assert len(rows) == len(re.findall(r"^\| `", section, re.MULTILINE))
    found: dict[str, set[str]] = {}
    for names, level in rows:
        events, levels = re.findall(r"\w+", names), level.split(", ")
        in_order = len(events) == len(levels)
        for n, event in enumerate(events):
            assert event not in found, event
            found[event] = {levels[n]} if in_order else set(levels)
    return found


@pytest.fixture(scope="module")
def logged() -> list[Any]:
    """The events that the package logs, with their levels and fields."""
    return list(logged_events(ROOT / "django_mq"))


def test_the_tables_have_every_event_with_its_levels(logged: list[Any]) -> None:
    found = defaultdict(set)
    for event, level, _ in logged:
        found[event].add(level)
    assert len(found) > 80
    assert documented_events() == found


def test_the_table_has_every_field(logged: list[Any]) -> None:
    found: dict[str, set[str]] = defaultdict(set)
    for event, _, fields in logged:
        found[event] |= fields
    found["operation_ended"] ^= {"**progress._asdict()", *Progress._fields}
    # The arguments of the signal. What the log has of messages, the next test sees.
    arguments = documented_names("## Signals")
    signals = {event for event, fields in found.items() if any("**" in each for each in fields)}
    assert signals == arguments.keys()
    documented = documented_names("### Fields of log records")
    for event in signals:
        if not event.startswith("message_"):
            assert documented.pop(event) == arguments[event], event
        del found[event]
    for event in MESSAGE_EVENTS:
        del documented[event]
    assert documented == {event: fields for event, fields in found.items() if fields}


@pytest.mark.django_db
def test_the_fields_of_messages(caplog: pytest.LogCaptureFixture) -> None:
    def run(delivery: Any) -> None:
        if delivery.type == "a.fails":
            raise ValueError

    with caplog.at_level("DEBUG", "django_mq"), isolated():
        handler("#", queue="mail", name="h", retry=RetryPolicy(max_attempts=2))(run)
        for type in ("a.works", "a.fails"):
            add(handler="h", type=type, max_attempts=2)
        drain(errors="keep")
        due()
        drain(errors="keep")
    plain = vars(logging.makeLogRecord({})).keys()
    documented = documented_names("### Fields of log records")
    seen = {}
    for record in caplog.records:
        if (event := vars(record).get("event")) in MESSAGE_EVENTS:
            seen[event] = vars(record).keys() - plain - {"event", "message", "asctime"}
    assert seen == {event: documented[event] for event in MESSAGE_EVENTS}


def test_a_record_as_json() -> None:
    names: dict[str, Any] = {}
    [code] = [each for each in snippets(DOCS / "reference.md", "python") if "JSONF" in each]
    exec(code, names)  # noqa: S102
    record = logging.makeLogRecord(
        {"name": "django_mq", "levelname": "INFO", "msg": "held: %s", "args": ("7",)}
    )
    vars(record).update(event="message_held", message_id=7, until=timezone.now(), level=3)
    line = names["JSONFormatter"]().format(record)
    found = json.loads(line)
    own = {"event", "message_id", "until", "level"}
    assert found.keys() == {"time", "severity", "message", *own}
    assert (found["message"], found["message_id"]) == ("held: 7", 7)
    assert (found["severity"], found["level"]) == ("INFO", 3)  # of the record, and of a backoff
    try:
        raise ValueError
    except ValueError:
        record.exc_info = sys.exc_info()
    assert "ValueError" in json.loads(names["JSONFormatter"]().format(record))["traceback"]


@contextmanager
def logging_of_the_page() -> Iterator[None]:
    logger = logging.getLogger("django_mq")
    before = logger.handlers[:], logger.level, logger.propagate
    names: dict[str, Any] = {}
    [code] = [each for each in snippets(DOCS / "reference.md", "python") if "LOGGING" in each]
    exec(code, names)  # noqa: S102
    logging.config.dictConfig(names["LOGGING"])
    try:
        yield
    finally:
        logger.handlers[:], logger.level, logger.propagate = before


@pytest.mark.django_db
def test_the_setting_shows_event_and_message(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(delivery: Any) -> None:
        raise ConnectionError

    with isolated(), logging_of_the_page():
        handler("shop.orders.placed", queue="mail")(fail)
        with transaction.atomic():
            broadcast("shop.orders.placed")
        assert len(drain(errors="keep")) == 1
        queues.pause("mail")
    id = QueuedMessage.objects.get().pk
    lines = capsys.readouterr().err
    assert f" WARNING message_retried message={id} message {id} (shop.orders.placed" in lines
    assert " INFO queue_paused message=- queue mail paused" in lines
