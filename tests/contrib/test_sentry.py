"""The recipe for Sentry, with its real SDK and a transport that keeps its input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sentry_sdk
from sentry_sdk.envelope import Envelope
from sentry_sdk.transport import Transport

from django_mq import RetryPolicy, handler, handlers
from django_mq.conf.error_logs import log_failure
from django_mq.messages import Delivery
from django_mq.signals import message_dead, worker_stopped
from django_mq.testing import drain
from tests.rows import add
from tests.test_docs import ROOT, snippets

pytestmark = pytest.mark.django_db


class Kept(Transport):
    """A transport that sends nothing before it is flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Any] = []
        self.events: list[Any] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        self.waiting.append(envelope.get_event())

    def flush(self, timeout: float, callback: Any = None) -> None:
        assert 0 < timeout <= 2
        self.events += self.waiting
        self.waiting.clear()


@pytest.fixture
def sentry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    """Run the recipe, with the integrations that Sentry has on by default, logging among them.

    Those that it enables for installed packages are off: they would change Django for other tests.
    """
    given: dict[str, Any] = {}
    monkeypatch.setattr(sentry_sdk, "init", given.update)
    names: dict[str, Any] = {"__name__": "recipe"}
    [code] = [each for each in snippets(ROOT / "docs/watching.md", "python") if "sentry" in each]
    exec(compile(code, "watching.md", "exec"), names)  # noqa: S102
    kept = Kept()
    with sentry_sdk.isolation_scope() as scope:
        scope.set_client(
            sentry_sdk.Client(**given, transport=kept, auto_enabling_integrations=False)
        )
        yield kept
    message_dead.disconnect(names["tell_sentry"])
    worker_stopped.disconnect(names["flush_sentry"])


def stopped() -> None:
    worker_stopped.send(sender="w", worker="w", drained=True)


def test_an_event_with_the_stack(sentry: Kept) -> None:
    with handlers.isolated():

        @handler("a.b", queue="mail", name="h", retry=RetryPolicy.never())
        def fails(delivery: Delivery) -> None:
            raise ValueError("broken")

        row = add(handler="h", type="a.b", max_attempts=1)
        drain(errors="keep")
    stopped()
    [event] = sentry.events
    [raised] = event["exception"]["values"]
    assert raised["type"] == "ValueError"
    assert raised["value"].startswith("broken")
    assert raised["stacktrace"]["frames"][-1]["function"] == "fails"
    assert event["tags"] == {"queue": "mail", "handler": "h"}
    assert event["contexts"]["message"] == {"id": row.pk, "type": "a.b"}


def test_a_message_that_died_without_an_attempt(sentry: Kept) -> None:
    with handlers.isolated():
        handler("a.b", queue="mail", name="h")(print)
        add(handler="h", type="a.b", expires=-1)
        drain()
    stopped()
    [event] = sentry.events
    assert event["message"] == "a message died: expired"


def test_other_errors_of_the_log_are_events(sentry: Kept) -> None:
    log_failure("chore_failed", ValueError(), "chore %s failed", "expire")
    stopped()
    [event] = sentry.events
    assert event["extra"]["event"] == "chore_failed"
