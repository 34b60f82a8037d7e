"""The settings that `FAULTS_SETTINGS` names (default: the test project's), made ready for faults.

| variable          | meaning                                                            |
|-------------------|--------------------------------------------------------------------|
| `FAULTS_SETTINGS` | module with your settings                                          |
| `FAULTS_DATABASE` | JSON that is put over `DATABASES[alias]`; the sweep sets it itself |
"""

import importlib
import json
import os
from typing import Any

_yours = importlib.import_module(os.environ.get("FAULTS_SETTINGS", "testproject.settings"))
globals().update({name: getattr(_yours, name) for name in dir(_yours) if name.isupper()})

INSTALLED_APPS: list[str] = [*_yours.INSTALLED_APPS, "tests.faults.app"]

_mq: dict[str, Any] = getattr(_yours, "DJANGO_MQ", {})
DJANGO_MQ = {
    # A short poll, since points wait for it. No point waits for the lease, unless a whole tree
    # died: a shorter one would hide a message that no process settles.
    "POLL_INTERVAL": 0.1,
    "LEASE": 120,
    "RETRY_FLOOR": 0.02,
    **_mq,
    "QUEUES": {
        **_mq.get("QUEUES", {}),
        "faults.ordered": {"ordered": True},
        "faults.easing": {"backoff": {"multiplier": 0.05, "maximum": 0.2}},
    },
}

_alias = _mq.get("DATABASE") or "default"
_database = {**_yours.DATABASES[_alias], **json.loads(os.environ.get("FAULTS_DATABASE", "{}"))}
if _database.get("HOST"):  # then the private server runs already, and is not started again
    _plain = "django.db.backends.postgresql"
    _database["ENGINE"] = _database["ENGINE"].replace("testproject.embedded", _plain)
DATABASES = {**_yours.DATABASES, _alias: _database}
