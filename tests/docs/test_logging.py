"""The section on logging in the reference: its table has every event, and its setting works."""

from __future__ import annotations

import logging
import logging.config
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import transaction

from django_mq import broadcast, handler, queues
from django_mq.handlers import isolated
from django_mq.models import QueuedMessage
from django_mq.testing import drain
from tests.docs.log_events import logged_events
from tests.docs.pages import DOCS
from tests.test_docs import ROOT, snippets

ROW = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \| ([A-Z, ]+) \| [^|]+ \|$", re.MULTILINE)


def documented_events() -> dict[str, set[str]]:
    """Return the levels of each event in the tables.

    As many levels as events in a row are in the order of the events; otherwise each event has all.
    """
    section = re.search(
        r"^### Log events$(.*?)^## ", (DOCS / "reference.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert section is not None
    rows = ROW.findall(section[1])
    assert len(rows) == len(re.findall(r"^\| `", section[1], re.MULTILINE))
    found: dict[str, set[str]] = {}
    for names, level in rows:
        events, levels = re.findall(r"\w+", names), level.split(", ")
        in_order = len(events) == len(levels)
        for n, event in enumerate(events):
            assert event not in found, event
            found[event] = {levels[n]} if in_order else set(levels)
    return found


def test_the_tables_have_every_event_with_its_levels() -> None:
    found = defaultdict(set)
    for event, level in logged_events(ROOT / "django_mq"):
        found[event].add(level)
    assert len(found) > 80
    assert documented_events() == found


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
