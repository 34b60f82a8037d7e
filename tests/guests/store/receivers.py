"""The guide's receiver and the snippet before it; the fork contains the last snippet."""

from tests.guests.recipes import snippets_under

for code in snippets_under("The recipe") + snippets_under("django-oscar")[:1]:
    exec(code, globals())  # noqa: S102
