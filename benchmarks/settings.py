"""The test project's settings, on a separate database for the benchmarks.

The benchmarks tell the processes they start what to do by three variables of the environment:

| variable             | meaning                                                            |
|----------------------|--------------------------------------------------------------------|
| `MQ_BENCH_DATABASE`  | which of the benchmarks' databases                                 |
| `MQ_BENCH_SETTINGS`  | `DJANGO_MQ` as JSON; without it everything is at its default       |
| `MQ_BENCH_RECORDING` | JSON: where a worker writes what it saw (`app/recording.py`)       |
"""

from importlib.util import find_spec

import django

from testproject.settings import *  # noqa: F403
from testproject.settings import DATABASES, INSTALLED_APPS, env

#: The database in which `create database` is said.
BENCH_MAINTENANCE_DATABASE = DATABASES["default"]["NAME"]
#: Named after it, so that nobody drops those of another run on this server: a lock of PostgreSQL
#: is one within the database. (A name has 63 bytes at most.)
BENCH_DATABASE = f"{BENCH_MAINTENANCE_DATABASE[:40]}_mq_bench"
BENCH_RECORDING = env.json("MQ_BENCH_RECORDING", default=None)

DATABASES["default"]["NAME"] = env.str("MQ_BENCH_DATABASE", default=BENCH_DATABASE)
INSTALLED_APPS = [*INSTALLED_APPS, "benchmarks.app"]
DJANGO_MQ = env.json("MQ_BENCH_SETTINGS", default={})
#: Django 5.2 has tasks only by their backport.
BENCH_TASKS = django.VERSION >= (6, 0) or find_spec("django_tasks") is not None
if BENCH_TASKS:
    TASKS = {"default": {"BACKEND": "django_mq.contrib.tasks.MessageQueueBackend"}}

# With DEBUG, Django keeps the text of every statement, which would distort the measurements.
DEBUG = False
