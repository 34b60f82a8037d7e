"""The receiver of the guide, and the snippet before it; the fork has the last one."""

from tests.guests.recipes import snippets_under

for code in snippets_under("The recipe") + snippets_under("django-oscar")[:1]:
    exec(code, globals())  # noqa: S102
