"""No page is half translated: only terms in Django's own catalogues are marked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from django.utils.translation import gettext, override

import django_mq

PACKAGE = Path(django_mq.__file__).parent
MARKED = re.compile(
    r"""\{%\s*translate\s+(["'])(.*?)\1|\{%\s*blocktranslate.*?%\}(.*?)\{%""", re.DOTALL
)
CALL = re.compile(r"\b(?:[np]*gettext(?:_lazy|_noop)?)\b")


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.html")), ids=lambda path: path.name)
def test_a_template_marks_terms_of_django_alone(path):
    for found in MARKED.finditer(path.read_text()):
        term = re.sub(r"\{\{\s*(\w+)\s*\}\}", r"%(\1)s", found[2] or found[3])
        with override("de"):
            assert gettext(term) != term, term


def test_no_module_marks_anything():
    marked = [path.name for path in PACKAGE.rglob("*.py") if CALL.search(path.read_text())]
    assert marked == []
