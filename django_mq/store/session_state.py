"""The session state, besides settings, that a handler may leave behind."""

from __future__ import annotations

#: Releases session locks, closes cursors that were declared WITH HOLD, stops listening and drops
#: temporary tables. Not DISCARD ALL: its DEALLOCATE ALL would take the driver's statements along.
DISCARD = "select pg_advisory_unlock_all(); close all; unlisten *; discard temp"
