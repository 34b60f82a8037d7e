"""Reports to probes, Prometheus and systemd.

`/livez` is for a probe that restarts the worker, `/readyz` for a probe that waits for it. Their
bodies name each part that failed, and reveal nothing about the queues.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Protocol

from django_mq.policy.exposition import CONTENT_TYPE
from django_mq.supervisor.health import Endpoint, HealthResponse, probe_response
from django_mq.supervisor.process_slot import ProcessSlot
from django_mq.supervisor.service import Service
from django_mq.supervisor.slot_totals import exposed, summed


class Condition(Protocol):
    """Whether the process works, for probes and systemd; both lists are empty if it does."""

    def not_live(self) -> Sequence[str]:
        """Return what is stalled or gone, so that a restart may help."""

    def not_ready(self) -> Sequence[str]:
        """Return why it takes no messages."""


class Reporter:
    """The endpoints of a command, and its systemd unit; each may be None."""

    def __init__(
        self,
        *,
        health: Endpoint | None,
        metrics: Endpoint | None,
        service: Service | None,
    ) -> None:
        self._health = health
        self._metrics = metrics
        self._service = service
        self._endpoints = [each for each in (health, metrics) if each is not None]

    @property
    def counts(self) -> bool:
        """Whether the processes must report the totals of their handlers."""
        return self._metrics is not None

    def descriptors(self) -> list[int]:
        """Return the descriptors that are readable when a client waits."""
        return [each.fileno() for each in self._endpoints if not each.rests()]

    def answer(
        self, readable: Collection[int], condition: Condition, slots: Sequence[ProcessSlot] = ()
    ) -> None:
        """Answer the clients that wait at the `readable` descriptors."""
        if self._health is not None and self._health.fileno() in readable:
            self._health.answer(
                {
                    "/livez": lambda: probe_response(condition.not_live()),
                    "/readyz": lambda: probe_response(condition.not_ready()),
                }
            )
        if self._metrics is not None and self._metrics.fileno() in readable:
            self._metrics.answer({"/metrics": partial(_metrics_page, slots)})

    def report(self, condition: Condition) -> None:
        """Report `condition` to systemd."""
        if self._service is not None:
            self._service.report(condition.not_live(), condition.not_ready())

    def stopping(self) -> None:
        """Tell systemd that the worker drains, or has ended by itself."""
        if self._service is not None:
            self._service.stopping()

    def close(self) -> None:
        """Close the ports in this process."""
        for each in self._endpoints:
            each.close()


def _metrics_page(slots: Sequence[ProcessSlot]) -> HealthResponse:
    totals = summed(slot.totals.by_source() for slot in slots)
    running = sum(bool(slot.pid) for slot in slots)
    return HealthResponse(exposed(totals, processes=running), media_type=CONTENT_TYPE)
