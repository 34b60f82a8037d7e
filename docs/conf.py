"""Sphinx: `sphinx-build -W -n docs docs/_build`, with the extra `docs` installed.

The pages are Markdown that GitHub shows as well: links are relative, anchors are GitHub's.
"""

import atexit
import os
import re
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# The docstrings are read from the package, which needs Django's settings; no database is opened.
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")

import django  # noqa: E402

django.setup()

from django_mq import __version__  # noqa: E402

project = "django_mq"
author = "The django_mq authors"
copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.intersphinx"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"django_mq {version}"

myst_heading_anchors = 4  # as GitHub has them
default_role = "code"  # docstrings write `name`, as Markdown does
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures have the names; the text below them has the units
autodoc_default_options = {"members": True}

INVENTORIES = {
    "python": ("https://docs.python.org/3/", "objects.inv"),
    "django": ("https://docs.djangoproject.com/en/stable/", "_objects/"),
    "psycopg": ("https://www.psycopg.org/psycopg3/docs/", "objects.inv"),
}


def inventory(name: str, url: str) -> str | None:
    """Return a file with the inventory at `url`; None without a network, or if that fails."""
    file = Path(tempfile.gettempdir(), f"django_mq-{os.getpid()}-{name}.inv")
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310
            file.write_bytes(answer.read())
    except OSError:
        return None
    atexit.register(file.unlink)
    return str(file)


# Read here, since a build with warnings as errors would fail with every site that is away.
intersphinx_mapping = {
    name: (site, file)
    for name, (site, path) in INVENTORIES.items()
    if (file := inventory(name, site + path))
}
# Links to others are links where their inventory is at hand, and plain names elsewhere.
nitpick_ignore_regex = [
    (r"py:.*", r"(django|psycopg|datetime|collections|typing|asyncio|contextlib)\..*"),
    (r"py:.*", r"[a-z]\w*|TypeError|ValueError|RuntimeError|TimeoutError|Exception"),
]


def offer_as_files(app: Sphinx, docname: str, source: list[str]) -> None:
    """Make links to Markdown outside docs/, which is no page of the site, downloads."""
    source[0] = re.sub(r"\[([^]]+)\]\((\.\.[./]*/[^)#]+\.md)\)", download(docname), source[0])


def download(docname: str) -> Callable[[re.Match[str]], str]:
    def replace(link: re.Match[str]) -> str:
        target = (ROOT / "docs" / docname).parent / link[2]
        inside = target.resolve().is_relative_to(ROOT / "docs")
        return link[0] if inside else f"{{download}}`{link[1]} <{link[2]}>`"

    return replace


def setup(app: Sphinx) -> None:
    app.connect("source-read", offer_as_files)
