"""Conditions of a message `m` that many statements share, and where scans by time begin."""

from __future__ import annotations

#: The message waits and is not blocked: the condition of the index mq_claim. Claims spell it out.
WAITS = "m.leased_until is null and m.blocked_by is null and m.dead_at is null"
#: The message waits or is blocked.
UNCLAIMED = "m.leased_until is null and m.dead_at is null"
#: Earlier than every time.
BEGINNING = "-infinity"
