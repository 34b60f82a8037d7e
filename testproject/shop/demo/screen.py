"""Shows the progress: as moving bars in a terminal, as plain lines anywhere else."""

import os
import shutil
import time
from collections.abc import Sequence

from django.core.management.base import OutputWrapper
from django.core.management.color import Style

from .books import Progress
from .ledger import Row

PLAIN_SECONDS = 1.0  # between two lines of progress where nothing can move
NARROW = 64  # columns that the bars need


class Screen:
    """Writes for people; only what a terminal shows is ever overwritten."""

    def __init__(self, out: OutputWrapper, style: Style) -> None:
        self.out = out
        self.style = style
        # Lines that wrap could not be written over.
        wide = shutil.get_terminal_size().columns >= NARROW
        self.moving = wide and out.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self.full, self.empty = "█░" if _can_show(out, "█░") else "#."
        self._drawn = 0
        self._rate = 0.0
        self._next = 0.0

    def title(self, text: str) -> None:
        self.out.write(self.style.MIGRATE_HEADING(text))

    def say(self, name: str, text: str = "") -> None:
        """Print one fact: its name and its value."""
        self.out.write(f"  {name:<10}{text}")
        self.out.flush()

    def progress(self, now: Progress, expected: int, seconds: float) -> None:
        """Show the progress: bars in place of the last ones, or now and then a line."""
        if self.moving:
            self._draw(now, expected, seconds)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + PLAIN_SECONDS
            counts = "  ".join(f"{name} {count}" for name, count in now._asdict().items())
            self.out.write(f"  {seconds:4.1f} s  {counts}")
            self.out.flush()

    def _draw(self, now: Progress, expected: int, seconds: float) -> None:
        width = max(10, min(50, shutil.get_terminal_size().columns - 40))
        if now.orders < expected:
            self._rate = now.orders / max(seconds, 0.1)
        lines = []
        for name in ("orders", "invoices", "mails", "packed"):
            count = getattr(now, name)
            done = min(width, width * count // max(expected, 1))
            bar = self.style.SUCCESS(self.full * done) + self.empty * (width - done)
            note = f"{self._rate:.0f} a second" if name == "orders" else ""
            lines.append(f"  {name:<10}{bar} {count:>5}  {note}\x1b[K")
        lines.append(
            f"  {'messages':<10}{now.waiting} waiting, {now.retrying} of them to be retried,"
            f" {now.dead} dead\x1b[K"
        )
        # Over the last ones: up as many lines as they are.
        self.out.write((f"\x1b[{self._drawn}A\r" if self._drawn else "") + "\n".join(lines))
        self.out.flush()
        self._drawn = len(lines)

    def table(self, rows: Sequence[Row]) -> None:
        """Show the count."""
        self.out.write("")
        for row in rows:
            verdict = ""
            if row.right is not None:
                verdict = self.style.SUCCESS("ok") if row.right else self.style.ERROR("WRONG")
            self.out.write(f"  {row.name:<20}{row.value:>8}  {row.note:<34}{verdict}".rstrip())
        self.out.write("")


def _can_show(out: OutputWrapper, text: str) -> bool:
    try:
        text.encode(getattr(out, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
