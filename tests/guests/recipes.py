"""Snippets of the documentation, run unchanged."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

GUIDE = Path(__file__).resolve().parents[2] / "docs/guides/signals.md"


def run_recipe(heading: str, names: dict[str, Any]) -> None:
    """Run the Python snippets under the guide's first recipe and under `heading`, in `names`."""
    for part in ("The recipe", heading):
        for code in snippets_under(part):
            exec(compile(code, GUIDE.name, "exec"), names)  # noqa: S102


def snippets_under(heading: str) -> list[str]:
    """Return the Python snippets of one section of the guide; raises LookupError if it has none."""
    sections = re.split(r"^## ", GUIDE.read_text(), flags=re.MULTILINE)
    [section] = [each for each in sections if each.partition("\n")[0].startswith(heading)]
    found = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    if not found:
        raise LookupError(f"no snippet under {heading!r} of {GUIDE}")
    return found
