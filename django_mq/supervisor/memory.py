"""The memory of a process."""

from __future__ import annotations

import os
from pathlib import Path

MEGABYTE = 1024 * 1024


def resident_bytes(pid: int) -> int:
    """Return the resident memory of process `pid`; 0 where the system does not provide it."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
