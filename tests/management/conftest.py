"""Run commands, at a terminal or without one."""

from __future__ import annotations

import json
import sys
from io import StringIO

import pytest
from django.core.management import call_command

from django_mq import handlers


@pytest.fixture(autouse=True)
def _no_handlers():
    with handlers.isolated():
        yield


@pytest.fixture
def terminal(monkeypatch):
    """Simulate a terminal at which these answers are typed; returns the questions."""

    def sit(*answers):
        questions = []
        replies = iter(answers)

        def ask(question):
            questions.append(question)
            return next(replies)

        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        monkeypatch.setattr("builtins.input", ask)
        return questions

    return sit


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stdin", StringIO())


def run(name, *arguments):
    out = StringIO()
    call_command(name, *map(str, arguments), stdout=out, no_color=True)
    return out.getvalue()


def run_json(name, *arguments):
    text = run(name, *arguments, "--json")
    assert text.isascii()
    return json.loads(text)


def rows(text):
    """Return the lines of a table as lists of words, keyed by their first word."""
    return {words[0]: words for line in text.splitlines() if (words := line.split())}
