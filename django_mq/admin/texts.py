"""Stored texts and times as a page may show them: shortened, cleaned and escaped."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from django_mq.conf.local_time import aware, local, utc_now
from django_mq.policy.durations import precise_span, span
from django_mq.policy.plain_text import one_line
from django_mq.queues import redacted
from django_mq.states import MessageState

#: The maximum length of a text that a page shows, and of a JSON text that it decodes.
MAX_TEXT, MAX_JSON = 50_000, 4 * 1024 * 1024
#: The maximum number of bytes of an error in a list.
EXCERPT = 120

# Invisible characters, and characters that reverse the direction of text: escaping keeps them, and
# they can make one text look like another.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]")


_JOINTS = re.compile("[._:/-]+")


def plain(text: str) -> str:
    """Return `text`, shortened, with invisible characters replaced.

    >>> plain("one\\ntwo\\x1b[2J \\u202efdp.exe")
    'one\\ntwo\ufffd[2J \ufffdfdp.exe'
    """
    return _cut(_UNSEEN.sub("\ufffd", text))


def excerpt(text: str) -> str:
    """Return the beginning of `text` on one line."""
    return one_line(text, EXCERPT)


def pretty(text: str | None, *, times: Collection[str] = ()) -> str:
    """Return stored JSON (None: null) indented, with values of secret keys hidden; never raises.

    In an object, numbers under the key `times` (seconds since 1970) are shown as date and time.

    >>> print(pretty('{"order": {"id": 7, "api_token": "abc"}}'))
    {
      "order": {
        "id": 7,
        "api_token": "********************"
      }
    }
    """
    text = text or "null"
    if len(text) > MAX_JSON:
        return "(too large to show)"
    try:
        found = redacted(json.loads(text))
        if isinstance(found, dict):
            found |= {key: _dated(found[key]) for key in times if key in found}
        shown = json.dumps(found, indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):  # secrets in it could not be hidden
        return "(cannot be decoded)"
    return _cut(_UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", shown))


def _dated(seconds: Any) -> Any:
    """Return seconds since 1970 as a date and time; another client may have written any value."""
    if type(seconds) not in (int, float):
        return seconds
    try:
        return moment_text(datetime.fromtimestamp(seconds, UTC))
    except (OverflowError, ValueError, OSError):
        return seconds


def took(start: datetime | None, end: datetime) -> str:
    """Return a duration as text, empty if its start is unknown."""
    if start is None:
        return ""
    return precise_span((end - start).total_seconds())


def moment_text(at: datetime) -> str:
    """Return a moment to the second, in the current time zone; the text does not name the zone."""
    return f"{local(at):%Y-%m-%d %H:%M:%S}"


def clock(at: datetime) -> str:
    """Return the time of day if it is today, else date and time."""
    shown = local(at)
    return f"{shown:%H:%M:%S}" if shown.date() == local(utc_now()).date() else moment_text(at)


def since(at: datetime, now: datetime) -> str:
    """Return how long before or after `now`, the database's time, `at` is."""
    at, now = aware(at), aware(now)
    if at > now:
        return f"in {span(at - now)}"
    return f"{span(now - at)} ago"


def when(at: datetime, now: datetime, pattern: str = "{}") -> SafeString:
    """Return `pattern` with `since()`, and the moment as a tooltip."""
    return format_html(
        '<time datetime="{}" title="{}">{}</time>',
        at.isoformat(),
        moment_text(at),
        pattern.format(since(at, now)),
    )


def full(at: datetime, now: datetime) -> SafeString:
    """Return the moment and `since()`."""
    return format_html(
        '<time datetime="{}">{}</time> <span class="mq-quiet">({})</span>',
        at.isoformat(),
        moment_text(at),
        since(at, now),
    )


def moment_column(
    column: str, description: str, show: Callable[[datetime, datetime], SafeString] = full
) -> Any:
    """Return a column of a page that shows a time of its rows; nothing if it is null."""

    @admin.display(description=description)
    def shown(page: Any, row: Any) -> Any:
        at = getattr(row, column)
        return None if at is None else show(at, row.now)

    return shown


def document_field(column: str, description: str) -> Any:
    """Return a field of a page that shows a JSON column of its row, with secrets hidden."""

    @admin.display(description=description)
    def shown(page: Any, row: Any) -> Any:
        return block(pretty(page.stored_json(row, column)))

    return shown


@admin.display(description="id", ordering="pk")
def number(row: Any) -> str:
    """Return the id of a message as people copy it: without thousands separators."""
    return str(row.pk)


def badge(state: str, text: Any = None) -> SafeString:
    """Return a state in its colour."""
    label = MessageState(state).label if text is None else text
    return format_html('<span class="mq-state mq-{}">{}</span>', state, label)


def link(url: str, text: object) -> SafeString | str:
    """Return a link, or plain text if `url` is empty."""
    return format_html('<a href="{}">{}</a>', url, text) if url else str(text)


def notes_below(*notes: Any) -> SafeString:
    """Return small notes to be shown below a text, each on a line."""
    return format_html_join("", '<span class="mq-under">{}</span>', ((each,) for each in notes))


def titled(title: Any, *notes: Any) -> SafeString:
    """Return the main cell of a row: what it is, and notes below."""
    return format_html('<span class="mq-type">{}{}</span>', title, notes_below(*notes))


def breakable(name: str) -> SafeString:
    """Return a name that a browser may break after dots, slashes and the like.

    >>> breakable("shop.orders/<1>")
    'shop.<wbr>orders/<wbr>&lt;1&gt;'
    """
    parts = _JOINTS.sub("\\g<0>\n", name).split("\n")
    return format_html_join(SafeString("<wbr>"), "{}", ((part,) for part in parts if part))


def block(text: str) -> SafeString:
    """Return a text with its line breaks."""
    return format_html('<pre class="mq-text" tabindex="0">{}</pre>', text)


def _cut(text: str) -> str:
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[:MAX_TEXT]}… ({len(text) - MAX_TEXT} characters more)"


def batch_note(count: int) -> str:
    """Return the end of a log entry for one of `count` messages; empty for a message alone.

    >>> batch_note(2), batch_note(1)
    (', one of 2 messages', '')
    """
    return f", one of {count:,} messages" if count > 1 else ""


def operator(request: HttpRequest) -> str:
    """Return the name of the user, which in a custom user model may be a number or an object."""
    return str(request.user.get_username())
