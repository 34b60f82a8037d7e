"""Examples on any page: settings, commands, SQL, systemd units, pages made from docstrings."""

from __future__ import annotations

import inspect
import pkgutil
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.core.management import load_command_class
from django.db import connection

import django_mq
from django_mq import queues
from django_mq.checks.databases import MIN_DRIVER_VERSION, MIN_SERVER_VERSION
from django_mq.conf import QueueOptions, Settings, _read_settings, find_errors
from django_mq.handlers import all_handlers
from tests.docs.pages import DOCS, story
from tests.rows import add
from tests.test_docs import ROOT, snippets

PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
LANGUAGES = ("console", "ini", "text", "yaml")
#: One of our commands, up to the end of it in a shell, a table or a YAML list.
COMMAND = re.compile(r"manage\.py[\"', ]+(mq_\w+)((?:[ \"',]+[^\s|&`\"',\]]+|[ ]+'[^']*')*)")
#: A command in a sentence, without its placeholders: `mq_peek [QUEUE] --heads`.
INLINE = re.compile(r"`(?:manage\.py )?(mq_(?!broadcast)\w+)((?: [^`\[\]]+)?)`")


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """Return each of our commands on a page, with its arguments."""
    text = "\n".join(code for language in LANGUAGES for code in snippets(page, language))
    found = []
    for name, rest in COMMAND.findall(text):
        plain = rest.replace('", "', " ").replace('"', "")
        found.append((name, shlex.split(plain)))
    there = {path.stem for path in (ROOT / "django_mq/management/commands").glob("mq_*.py")}
    spans = INLINE.findall(page.read_text())
    return found + [(name, shlex.split(rest)) for name, rest in spans if rest and name in there]


COMMANDS = sorted({(name, *rest) for page in PAGES for name, rest in commands(page)})


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_take_these_arguments(command: tuple[str, ...]) -> None:
    name, *arguments = command
    if name == "mq_demo":
        return
    arguments = ["7" if each == "ID" else each for each in arguments]
    load_command_class("django_mq", name).create_parser("manage.py", name).parse_args(arguments)


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 10
    assert ("mq_worker", "--processes", "2", "--health-port", "8081") in COMMANDS


def read(given: dict[str, Any]) -> Settings:
    settings, errors = _read_settings(given)
    assert settings is not None, errors
    return settings


def values(settings: Settings | QueueOptions) -> dict[str, Any]:
    """Return settings in a comparable form: a pattern becomes its text."""
    found = {name: getattr(settings, name) for name in settings.__dataclass_fields__}
    return {name: getattr(value, "pattern", value) for name, value in found.items()}


def test_the_page_of_settings_has_all_of_them_with_their_defaults() -> None:
    whole, queue, small = snippets(DOCS / "settings.md", "python")
    names: dict[str, Any] = {}
    exec(whole, names)  # noqa: S102
    given = names["DJANGO_MQ"]
    assert {name.lower() for name in given} == Settings.__dataclass_fields__.keys() - {"unlisted"}
    assert values(read(given)) == values(read({}))
    exec(queue, names)  # noqa: S102
    assert given["QUEUES"]["payments"].keys() == QueueOptions.__dataclass_fields__.keys()
    assert values(read(given).queue("payments")) == values(read({}).unlisted)
    exec(small, names)  # noqa: S102
    assert names["DJANGO_MQ"] is not given
    assert not find_errors(names["DJANGO_MQ"])


def test_the_settings_behind_a_pooler() -> None:
    poll, direct = snippets(DOCS / "deploy/pgbouncer.md", "python")
    names: dict[str, Any] = {}
    for code in (poll, direct):
        exec(code, names)  # noqa: S102
        assert not find_errors(names["DJANGO_MQ"])
    direct_alias = names["DATABASES"][names["DJANGO_MQ"]["WAKEUP"]]
    assert not direct_alias["DISABLE_SERVER_SIDE_CURSORS"]  # W002 takes it for a pooler's sign


@pytest.mark.django_db
def test_the_query_that_scales() -> None:
    (query,) = snippets(DOCS / "deploy/kubernetes.md", "sql")
    page = (DOCS / "deploy/kubernetes.md").read_text()
    shown, of_jobs = re.findall(r"query: >-\n((?: {10}.*\n)+)", page)
    assert "".join(shown.split()) == "".join(query.split())
    add("videos"), add("videos", leased=30), add("videos", dead=-5), add("videos", after=60)
    add("videos", leased=-5), add("mail"), add("mail")
    with connection.cursor() as cursor:
        for each, count in ((query, 3), (of_jobs, 2)):
            cursor.execute(each)
            assert cursor.fetchone() == (count,)


def test_the_reference_has_every_public_name() -> None:
    """The names of `django_mq` are listed by hand; other modules list their own."""
    text = (DOCS / "api.md").read_text()
    modules = re.findall(r"automodule:: ([\w.]+)", text)
    listed = set(re.findall(r"auto(?:function|class):: (\w+)", text))
    for name in modules:
        module = pkgutil.resolve_name(name)
        listed |= set(getattr(module, "__all__", vars(module)))
    assert set(django_mq.__all__) - {"__version__"} <= listed


def options_in_the_reference(section: str) -> set[str]:
    """Return the names in the first column of the section's first table."""
    text = (DOCS / "reference.md").read_text()
    found = re.search(rf"^## {section}$.*?((?:^\|[^\n]*\n)+)", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    first_column = "".join(row.split("|")[1] for row in found[1].splitlines())
    return set(re.findall(r"`(\w+)`", first_column))


@pytest.mark.parametrize(
    ("section", "function"),
    [("Options of a handler", django_mq.handler), ("Options of a broadcast", django_mq.broadcast)],
)
def test_the_reference_has_every_option(section: str, function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    options = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
    assert options_in_the_reference(section) == options


#: Parameters that the reference explains once for all functions, or that only the admin passes.
UNLISTED = {"using", "wanted", "user_id", "matched"}


def test_reference_has_every_parameter_of_the_operator_functions() -> None:
    text = (DOCS / "reference.md").read_text()
    listed = dict(re.findall(r"^\| `(\w+)\(([^`]*)\)` \|", text, re.MULTILINE))
    functions = {
        name: found for name in listed if inspect.isfunction(found := getattr(queues, name, None))
    }
    assert {"edit", "errors", "operate"} <= functions.keys()
    for name, function in functions.items():
        parameters = set(inspect.signature(function).parameters) - UNLISTED
        assert parameters - set(re.findall(r"\w+", listed[name])) == set(), name


def test_the_supported_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (DOCS / "reference.md").read_text()
    table = dict(re.findall(r"^\| (\w+) \| ([^|]+) \|", text.split("## Settings")[0], re.MULTILINE))
    numbers = {name: re.findall(r"\d[\d.]*", cell) for name, cell in table.items()}
    assert numbers == {
        "Python": re.findall(r"\d[\d.]*", project["requires-python"]),
        "Django": re.findall(r"Django :: (\d\.\d)", " ".join(project["classifiers"])),
        "PostgreSQL": [str(MIN_SERVER_VERSION)],
        "psycopg": [".".join(map(str, MIN_DRIVER_VERSION))],
    }
    assert f"psycopg>={numbers['psycopg'][0]}" in project["dependencies"]


@pytest.mark.django_db
def test_the_page_of_the_history() -> None:
    """It reads as one module; the replay at its end finds nothing to replay yet."""
    with story("history.md", confirmed=[]) as page:
        assert [each.name for each in all_handlers()] == ["mail.confirmation"]
        assert not find_errors(page.DJANGO_MQ)
