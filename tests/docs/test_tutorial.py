"""docs/tutorial.md, step by step: its files and commands, in a separate project."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import django
import pytest
from django.db import connection

from tests.database import second_connection
from tests.docs.pages import DOCS
from tests.test_docs import ROOT

PAGE = (DOCS / "tutorial.md").read_text()
#: A file (an instruction and its path), an output, or commands.
STEP = re.compile(
    r"(?:(Write|Append to|Up to Django 6\.0, also append to)\s`([\w/]+\.py)`[^`]*?\n\n)?"
    r"^```(python|console|text)\n(.*?)^```",
    re.MULTILINE | re.DOTALL,
)
#: Commands that are already done here: they serve readers with an empty machine.
DONE = ("python3 -m venv", ". .venv", "pip install", "createdb")


class Project:
    """A reader's directory, in which each command of the page runs."""

    def __init__(self, directory: Path, database: str) -> None:
        self.directory = directory
        own = connection.get_connection_params()
        names = {"host": "PGHOST", "port": "PGPORT", "user": "PGUSER", "password": "PGPASSWORD"}
        login = {variable: str(own[key]) for key, variable in names.items() if own.get(key)}
        ours = ("DJANGO_SETTINGS_MODULE", "DATABASE_URL")
        inherited = {name: value for name, value in os.environ.items() if name not in ours}
        self.environment = {**inherited, **login, "PYTHONPATH": str(ROOT)}
        self.database = database

    def write(self, how: str, path: str, text: str) -> None:
        file = self.directory / path
        text = text.replace('"tutorial"', f'"{self.database}"')
        file.write_text(text if how == "Write" else f"{file.read_text()}\n\n{text}")

    def run(self, command: str) -> str:
        """Return the output of the command, or the last line of its error."""
        if command == "python manage.py mq_worker":
            command += " --until-empty"
        line = re.sub(r"^python ", f"{sys.executable} ", command)
        line = re.sub(r"^django-admin ", f"{sys.executable} -m django ", line)
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0 or "ValueError: we do not have" in said, f"{command}\n{said}"
        return said


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    name = f"tutorial_{os.getpid()}"
    with second_connection() as other:
        other.execute(f"create database {name}")
        try:
            yield Project(tmp_path, name)
        finally:
            other.execute(f"drop database if exists {name} with (force)")


#: The pages of step 8 in Django's own client, and the action behind the button.
BROWSE = """
from django.contrib.auth.models import User
from django.test import Client
from django_mq.models import QueuedMessage
client = Client(SERVER_NAME="127.0.0.1")
client.force_login(User.objects.create_superuser("ada"))
page = client.get("/admin/django_mq/queuestate/").content.decode()
assert "mail" in page
dead = QueuedMessage.objects.get(dead_at__isnull=False)
page = client.get(f"/admin/django_mq/queuedmessage/{dead.pk}/change/").content.decode()
assert "no such mailbox" in page and "Requeue" in page
from django_mq import queues
queues.requeue(ids=[dead.pk])
"""


def test_every_file_has_a_path() -> None:
    assert [
        text for how, _, language, text in STEP.findall(PAGE) if language == "python" and not how
    ] == []


@pytest.mark.django_db(transaction=True)
@pytest.mark.thorough
def test_every_step(project: Project) -> None:
    said: dict[str, str] = {}
    latest = ""
    for how, path, language, text in STEP.findall(PAGE):
        if language == "python":
            if how.startswith("Up to") and django.VERSION >= (6, 1):
                continue
            project.write(how, path, text)
            continue
        if language == "text":
            assert text.startswith("docker") or text.strip() in latest
            continue
        for command in text.splitlines():
            if command.startswith(DONE) or command.endswith(("createsuperuser", "runserver")):
                continue
            latest = said[command] = project.run(command)
    assert "invoices" in said["python manage.py mq_status"]
    assert "no such mailbox" in said["python manage.py mq_why 6"]
    assert "2 tests" in said["python manage.py test shop"]
    assert "3 invoices" in project.run("python manage.py mq_worker")
    (project.directory / "browse.py").write_text(BROWSE)
    project.run("python manage.py shell -c \"exec(open('browse.py').read())\"")
    assert "To: eve@example.com" in project.run("python manage.py mq_worker")
