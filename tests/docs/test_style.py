"""docs/style.md has the layers of pyproject.toml."""

from __future__ import annotations

import re
import tomllib

from tests.docs.pages import DOCS
from tests.test_docs import ROOT


def test_every_package_is_in_its_layer() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = (
        each for each in project["tool"]["importlinter"]["contracts"] if each["id"] == "packages"
    )
    layers = reversed(contract["layers"])
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", (DOCS / "style.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(
        (str(number), package)
        for number, layer in enumerate(layers, start=1)
        for package in re.findall(r"\w+", layer)
    )
