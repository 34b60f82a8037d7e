"""Only the handlers of the test exist; workers run in threads of the test process."""

from tests.worker.conftest import registry, said, start  # noqa: F401  (fixtures)
