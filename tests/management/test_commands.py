"""Common behaviour of all operator commands: options, refusals, questions at a terminal."""

from __future__ import annotations

import re
import shlex
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import BaseCommand, CommandError, call_command, load_command_class
from django.db import connection, connections

from django_mq import handlers
from django_mq.management.commands import mq_status
from django_mq.models import FailedAttempt, QueueState, Schedule, WorkerCommand
from tests.management.conftest import run
from tests.outbox.schedules.conftest import put
from tests.rows import add, beat, decide

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _known(settings):
    """A queue of the settings needs no --force."""
    settings.DJANGO_MQ = {"QUEUES": {"mail": {}}}


COMMANDS = {
    "mq_status": [],
    "mq_why": ["1"],
    "mq_peek": [],
    "mq_pause": ["mail"],
    "mq_resume": ["mail"],
    "mq_limit": ["mail", "5"],
    "mq_requeue": ["--all", "--yes"],
    "mq_replay": ["--id", "1", "--yes"],
    "mq_run_now": ["--queue", "mail", "--yes"],
    "mq_stop": ["1", "--yes"],
    "mq_purge": ["--all", "--yes"],
    "mq_schedule": [],
    "mq_workers": [],
}

AUDITED = """
create function pg_temp.audit() returns trigger language plpgsql as
$$ begin insert into audit_log values (old.id); return old; end $$;
create trigger audit before delete on django_mq_queuedmessage
   for each row execute function pg_temp.audit()
"""


EVERY = sorted(path.stem for path in Path(mq_status.__file__).parent.glob("mq_*.py"))
#: Options that Django adds to each command.
STOCK = {action.dest for action in BaseCommand().create_parser("manage.py", "any")._actions}


def options(name):
    """Return the arguments that the command itself adds."""
    parser = load_command_class("django_mq", name).create_parser("manage.py", name)
    return [each for each in parser._actions if each.dest not in STOCK]


@pytest.mark.parametrize("name", EVERY)
def test_the_help_explains_every_argument(name):
    assert [each.dest for each in options(name) if not each.help] == []
    assert load_command_class("django_mq", name).help


@pytest.mark.parametrize("name", EVERY)
def test_the_reference_has_every_argument(name):
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference.md").read_text()
    [line] = re.findall(rf"^\| `{name}\b.*$", page, re.MULTILINE)
    line = line.replace("\\|", "|")
    named = re.findall(r"--[a-z-]+", line)
    common = {"--database", "--json"}
    own = {each.option_strings[-1] for each in options(name) if each.option_strings}
    assert set(named) == own - common
    places = [str(each.metavar or each.dest) for each in options(name) if not each.option_strings]
    assert all(place in line for place in places)


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        (("mq_errors", "--queue", "mial"), "names the queue 'mial', and it has no messages: did"),
        (("mq_peek", "mial", "--heads"), "did you mean 'mail'?"),
        (("mq_replay", "--queue", "mial", "--yes"), "did you mean 'mail'?"),
        (("mq_replay", "--handler", "send_mial", "--dry-run"), "(did you mean send_mail?"),
        (("mq_requeue", "--queue", "mial", "--yes"), "did you mean 'mail'?"),
        (("mq_requeue", "--handler", "send_mial", "--yes"), "no handler here is 'send_mial' (did"),
        (("mq_purge", "--handler", "send_mial", "--yes"), "did you mean send_mail?"),
        (("mq_purge", "--type", "mial.sent", "--yes"), "no handler here takes 'mial.sent' (did"),
        (("mq_requeue", "--type", "mial.sent", "--yes"), "(did you mean mail.sent?"),
        (("mq_replay", "--type", "mial.sent", "--yes"), "(did you mean mail.sent?"),
    ],
)
def test_unknown_name_gets_a_note_if_nothing_is_found(command, wanted, capsys):
    @handlers.handler("t", "mail.sent", name="send_mail")
    def send(delivery):
        pass

    run(*command)
    assert wanted in capsys.readouterr().err
    run(*(each.replace("mial", "mail") for each in command))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "command",
    ["mq_pause", "mq_status", "mq_peek", "mq_limit 5", "mq_requeue", "mq_purge", "mq_errors"],
)
def test_a_second_queue_is_refused(command):
    """mq_worker takes several, so an operator may expect it: the last one alone would count."""
    with pytest.raises(CommandError, match="--queue: one queue at a time, not both mail and other"):
        run(*command.split(), "--queue", "mail", "--queue", "other")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_takes_a_database(name):
    assert run(name, *COMMANDS[name], "--database", "default")
    with pytest.raises(CommandError, match="DATABASES has no 'nowhere'; choose one of default"):
        run(name, *COMMANDS[name], "--database", "nowhere")
    with pytest.raises(CommandError, match="DATABASES has no ''; choose one of default"):
        run(name, *COMMANDS[name], "--database", "")  # an unset shell variable


@pytest.mark.parametrize("name", COMMANDS)
def test_each_refuses_another_kind_of_database(name, monkeypatch):
    monkeypatch.setattr(connection, "vendor", "sqlite")
    monkeypatch.setattr(connection, "display_name", "SQLite")
    with pytest.raises(CommandError, match="is SQLite; django_mq needs PostgreSQL"):
        run(name, *COMMANDS[name])


@pytest.mark.parametrize("name", COMMANDS)
def test_each_refuses_an_engine_that_does_not_exist(name, monkeypatch):
    """Django reads the engine of an alias when it is first used."""
    monkeypatch.setitem(connections.settings, "other", {"ENGINE": "nonsense"})
    with pytest.raises(CommandError, match="'nonsense' isn't an available database backend"):
        run(name, *COMMANDS[name], "--database", "other")


class _Unreachable(Exception):
    """The error of a vault's client."""


@pytest.fixture
def _vault_is_away(transactional_db, monkeypatch):
    def fetch(self):
        raise _Unreachable("token 1234")

    connection.close()
    monkeypatch.setattr(type(connections["default"]), "get_connection_params", fetch)


@pytest.mark.usefixtures("_vault_is_away")
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("name", ["mq_status", "mq_pause", "mq_schedule", "mq_worker"])
def test_each_says_in_one_line_that_the_backend_cannot_connect(name):
    """The text of the error may have the password; --traceback shows it."""
    with pytest.raises(CommandError) as caught:
        run(name, *COMMANDS.get(name, []))
    text = str(caught.value)
    assert text.startswith("database 'default' cannot be used: its backend cannot connect: ")
    assert f"._Unreachable at {__file__}:" in text
    assert text.endswith(". Perhaps the service that has the password is away.")
    assert "1234" not in text
    assert caught.value.returncode == 1


@pytest.mark.usefixtures("_vault_is_away")
@pytest.mark.django_db(transaction=True)
def test_the_doctor_says_that_the_backend_cannot_connect():
    out = StringIO()
    with pytest.raises(SystemExit, match="2"):
        call_command("mq_doctor", stdout=out, no_color=True)
    said, hint = out.getvalue().splitlines()
    assert said.startswith("D001 error  Database 'default' cannot be reached: its backend cannot c")
    assert hint.strip() == "Perhaps the service that has the password is away."
    assert "1234" not in said


def test_commands_refuse_a_database_without_autocommit(monkeypatch):
    monkeypatch.setitem(connection.settings_dict, "AUTOCOMMIT", False)
    with pytest.raises(CommandError, match="AUTOCOMMIT is off for database 'default'"):
        run("mq_pause", "mail")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("mq_pause mail --for 0", "queue mail cannot be paused for 0 seconds: give a longer time"),
        ("mq_pause mail --for 9999999d", "paused for 863,999,913,600 seconds: that is too far"),
        ("mq_pause mail --until 2020-01-01", "until 2020-01-01 00:00:00+00:00: that time has"),
        ("mq_pause ''", "queue '' is not a name"),
        ("mq_resume ''", "queue '' is not a name"),
        ("mq_limit '' 5", "queue '' is not a name"),
        ("mq_limit mail -1", "'-1' is not a whole number from 0 to 2,147,483,647, or none"),
        ("mq_limit mail 1e3", "'1e3' is not a whole number from 0 to 2,147,483,647, or none"),
        ("mq_limit mail 2147483648", "'2147483648' is not a whole number from 0 to 2,147,483,647"),
        ("mq_peek --limit 0", "argument --limit: '0' is not a whole number from 1 to 9,223,372,0"),
        ("mq_peek --limit x", "argument --limit: 'x' is not a whole number from 1 to 9,223,372,0"),
        ("mq_errors --limit -3", "argument --limit: '-3' is not a whole number from 1 to 10,000"),
        ("mq_requeue --all --limit 0", "argument --limit: '0' is not a whole number from 1 to"),
        (
            "mq_requeue --all --attempts 0",
            "argument --attempts: '0' is not a whole number from 1 to 1,000,000",
        ),
        ("mq_replay --id 1 --limit 1.5", "argument --limit: '1.5' is not a whole number from 1"),
        ("mq_worker --threads 0", "argument --threads: '0' is not a whole number from 1 to 1,000"),
        ("mq_worker --threads 1001", "--threads: '1001' is not a whole number from 1 to 1,000"),
        ("mq_worker --processes x", "--processes: 'x' is not a whole number from 1 to 1,000"),
        ("mq_worker --batch-size 10001", "'10001' is not a whole number from 1 to 10,000"),
        ("mq_worker --max-messages 0", "'0' is not a whole number from 1 to 2,147,483,647"),
        ("mq_worker --max-rss 0", "argument --max-rss: '0' is not a whole number from 1 to"),
        ("mq_worker --drain-seconds -1", "'-1' is not a number of seconds from 0"),
        ("mq_worker --health-port 70000", "'70000' is not a port from 1 to 65535"),
        ("mq_worker --health-port host:", "'host:' is not a port from 1 to 65535, or an address"),
        ("mq_replay --since 1h --until 2h", "since must be before until"),
        ("mq_replay --since 2026-02-01 --until 2026-01-01", "since must be before until"),
        ("mq_replay --since 9000-01-01", "9000-01-01' is in the future"),
        ("mq_replay --id x", "'x' is not the id of a message"),
        ("mq_replay --id 0", "'0' is not the id of a message"),
        ("mq_requeue --id 1 -2", "'-2' is not the id of a message"),
        ("mq_purge --id 1.5", "'1.5' is not the id of a message"),
        ("mq_why -1", "'-1' is not the id of a message"),
        ("mq_why 9223372036854775808", "'9223372036854775808' is not the id of a message"),
        ("mq_why \u0661", "is not the id of a message"),
        ("mq_stop 0 --yes", "'0' is not the id of a message"),
        ("mq_workers quiet '' --yes", "no live worker has the id '': see mq_workers"),
        ("mq_workers stop --host '' --yes", "name the workers: by ID, by --host, or --all"),
        ("mq_workers list --host ''", "name workers after quiet, resume or stop"),
    ],
)
def test_senseless_value_is_refused(command, said):
    with pytest.raises(CommandError, match=re.escape(said)):
        run(*shlex.split(command))


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("mq_pause mail --until 2020-01-01", "until 2020-01-01 00:00:00+01:00: that time has"),
        (
            "mq_replay --since 2026-02-01 --until 2026-01-01",
            "2026-02-01 00:00:00+01:00 is after 2026-01-01 00:00:00+01:00",
        ),
    ],
)
def test_a_time_that_makes_no_sense_is_shown_as_it_was_given(command, said, settings):
    settings.TIME_ZONE = "Europe/Berlin"
    with pytest.raises(CommandError, match=re.escape(said)):
        run(*shlex.split(command))


def test_errors_show_how_to_run_their_messages_again():
    message = add(attempts=1, after=60)
    FailedAttempt.objects.create(
        message_id=message.pk, queue="mail", type="t", attempt=1, fingerprint="0" * 16
    )
    text = run("mq_errors")
    assert "mq_run_now --fingerprint HASH runs the messages that wait" in text
    assert "mq_requeue --fingerprint HASH requeues the dead ones" in text
    message.delete()
    assert "--fingerprint" not in run("mq_errors")


def test_errors_that_do_not_match_are_no_errors_at_all():
    assert run("mq_errors") == "No failed attempts are kept.\n"
    for options in (("--since", "0"), ("--queue", "mail")):
        assert run("mq_errors", *options) == "No failed attempt matches.\n"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("mq_pause", ["no such name"]),
        ("mq_resume", ["no such name"]),
        ("mq_resume", ["no such name", "--backoff"]),
        ("mq_limit", ["no such name", "5"]),
        ("mq_limit", ["mail", "few"]),
        ("mq_limit", ["mail", "-1"]),
        ("mq_limit", ["mail", "\u0661"]),
        ("mq_limit", ["mail", "2147483648"]),
        ("mq_peek", ["no such name"]),
        ("mq_peek", ["--limit", "0"]),
        ("mq_purge", ["--queue", "no such name"]),
        ("mq_requeue", ["--type", "\x1b[2J"]),
        ("mq_requeue", ["--id", "0"]),
        ("mq_requeue", ["--id", "1", "--queue", "mail"]),
        ("mq_requeue", ["--all", "--attempts", "0"]),
        ("mq_routes", ["no such name"]),
        ("mq_routes", ["a", "--metadata", "[1]"]),
        ("mq_routes", ["a", "--metadata", "{"]),
        ("mq_routes", ["a", "--metadata", "[" * 100_000]),
        ("mq_routes", ["shop.*"]),
        ("mq_routes", ["--metadata", "{}"]),
        ("mq_requeue", []),
        ("mq_run_now", []),
        ("mq_run_now", ["--limit", "5"]),
        ("mq_run_now", ["--id", "1", "--queue", "mail"]),
        ("mq_requeue", ["--fingerprint", "x"]),
        ("mq_replay", []),
        ("mq_purge", ["--all", "--queue", "mail"]),
        ("mq_workers", ["quiet"]),
        ("mq_workers", ["list", "abc"]),
        ("mq_schedule", ["run"]),
        ("mq_pause", ["mail", "--queue", "mail"]),
        ("mq_peek", ["--heads", "--dead"]),
        ("mq_status", ["--watch", "--json"]),
        ("mq_pause", ["mail", "--until", "2020-01-01T00:00"]),
        ("mq_pause", ["mail", "--until", "tomorrow"]),
        ("mq_pause", ["mail", "--until", "2999-01-01T00:00", "--for", "5m"]),
    ],
)
def test_bad_input_is_a_command_error(name, arguments):
    with pytest.raises(CommandError) as caught:
        run(name, *arguments)
    assert type(caught.value) is CommandError  # Django prints the name of the class
    assert "\x1b" not in str(caught.value)
    assert exit_code(name, arguments) == 2


@pytest.mark.parametrize("name", [*COMMANDS, "mq_worker", "mq_consume"])
def test_an_alias_that_does_not_exist_is_two(name, settings):
    """Only as an option: in the settings, it is the configuration that is wrong."""
    settings.DJANGO_MQ = {"INBOXES": {"crm": {"kind": "redis", "url": "redis://x", "source": "s"}}}
    arguments = ["crm"] if name == "mq_consume" else COMMANDS.get(name, [])
    assert exit_code(name, [*arguments, "--database", "nowhere"]) == 2
    settings.DJANGO_MQ = {**settings.DJANGO_MQ, "DATABASE": "nowhere"}
    assert exit_code(name, arguments) == 1


@pytest.mark.parametrize(
    ("name", "arguments", "code"),
    [
        *(("mq_schedule", [each, "unknown"], 1) for each in ("list", "next", "run", "enable")),
        ("mq_workers", ["quiet", "unknown"], 1),
        ("mq_workers", ["quiet", "--host", "unknown"], 1),
        ("mq_limit", ["unknown", "5"], 1),
        ("mq_pause", ["unknown", "--yes"], 1),
        ("mq_replay", ["--id", "1", "--to", "unknown"], 2),
        ("mq_consume", ["unknown"], 2),
    ],
)
def test_exit_code_is_1_for_names_the_database_lacks_and_2_for_names_the_code_lacks(
    name, arguments, code
):
    assert exit_code(name, arguments) == code


def exit_code(name, arguments):
    """Return the exit code of a command that fails, as `manage.py` would."""
    command = load_command_class("django_mq", name)
    command._called_from_command_line = True  # the parser exits by itself then
    with pytest.raises((CommandError, SystemExit)) as caught:
        command.execute(**vars(command.create_parser("manage.py", name).parse_args(arguments)))
    return getattr(caught.value, "returncode", None) or caught.value.code


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("mq_limit mail --force 5", "Queue mail has at most 5 messages in flight"),
        ("mq_limit mail 5 --force", "Queue mail has at most 5 messages in flight"),
        ("mq_limit mail --queue slow 5", "name the queue once"),
        ("mq_limit mail --force", "'mail' is not a whole number"),
        ("mq_schedule run --json unknown", "there is no schedule unknown"),
        ("mq_workers quiet --yes unknown", "no live worker has the id 'unknown'"),
        ("mq_stop 1 --yes 2", "there is nothing to stop"),
        ("mq_peek mail --limit 5 more", "unrecognized arguments: more"),
    ],
)
def test_options_may_stand_between_the_other_words(command, said):
    name, *arguments = command.split()
    try:
        found = run(name, *arguments)
    except CommandError as error:
        found = str(error)
    assert said in found


@pytest.mark.parametrize(
    ("name", "options", "known"),
    [
        ("mq_schedule", {}, "list, run, enable, disable, next"),
        ("mq_schedule", {"name": "hourly"}, "list, run, enable, disable, next"),
        ("mq_workers", {"all": True, "yes": True}, "list, quiet, resume, stop"),
    ],
)
def test_an_action_that_argparse_has_not_read_is_checked(name, options, known):
    put("hourly")
    beat("w")
    with pytest.raises(CommandError, match=f"no action is 'dissable': choose one of {known}$"):
        call_command(name, action="dissable", **options)
    assert Schedule.objects.get().enabled
    assert not WorkerCommand.objects.exists()


@pytest.mark.parametrize("arguments", [("mq_pause", "mail"), ("mq_purge", "--all", "--yes")])
def test_a_read_only_database_is_named(arguments):
    add(dead=-1)
    with connection.cursor() as cursor:
        cursor.execute("set transaction read only")
    with pytest.raises(CommandError, match=r"^database 'default' is read-only: cannot execute "):
        run(*arguments)


def test_missing_table_of_a_trigger_is_no_missing_migration():
    """A table is missing for somebody else's trigger: to migrate would not help."""
    add(dead=-1)
    with connection.cursor() as cursor:
        cursor.execute(AUDITED)
    with pytest.raises(CommandError, match='relation "audit_log" does not exist'):
        run("mq_purge", "--all", "--yes")


@pytest.mark.parametrize(
    "arguments",
    [
        ("mq_pause", "mail"),
        ("mq_resume", "stopped"),
        ("mq_resume", "failing", "--backoff"),
        ("mq_limit", "mail", "5"),
    ],
)
def test_terminal_asks_for_a_confirmation_and_a_script_does_not(terminal, arguments):
    """The action can be undone, so a script needs no --yes."""
    decide("stopped", paused=-1)
    decide("failing", backoff_level=1, backoff=60)
    before = list(QueueState.objects.values())
    questions = terminal("n", "y")
    assert run(*arguments) == "Nothing was changed.\n"
    assert list(QueueState.objects.values()) == before
    run(*arguments)
    assert len(questions) == 2
    assert arguments[1] in questions[0]
    assert list(QueueState.objects.values()) != before
    QueueState.objects.all().delete()
    decide("stopped", paused=-1)
    decide("failing", backoff_level=1, backoff=60)
    before = list(QueueState.objects.values())
    run(*arguments, "--yes")
    assert len(questions) == 2
    assert list(QueueState.objects.values()) != before
