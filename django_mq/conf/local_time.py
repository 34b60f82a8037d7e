"""Moments in aware and in local form, with USE_TZ on or off.

With USE_TZ off, Django and its cursors return naive datetimes in the zone TIME_ZONE, and
`timezone.now()` is naive, too. Schedules, handlers and users have aware datetimes in either case.
"""

from datetime import UTC, datetime

from django.utils import timezone


def utc_now() -> datetime:
    """Return the time of this process, as an aware datetime."""
    return datetime.now(UTC)


def aware(at: datetime) -> datetime:
    """Return `at` as an aware datetime; a naive one is in the zone TIME_ZONE."""
    if timezone.is_aware(at):
        return at
    return timezone.make_aware(at, timezone.get_default_timezone())


def local(at: datetime) -> datetime:
    """Return `at` in the current time zone; a naive datetime is local already."""
    return timezone.localtime(at) if timezone.is_aware(at) else at


def local_text(at: datetime | None) -> str:
    """Return a moment as text, to the second, in the current time zone; the text names the zone."""
    if at is None:
        return "an unknown time"
    return f"{local(at):%Y-%m-%d %H:%M:%S %Z}".rstrip()
