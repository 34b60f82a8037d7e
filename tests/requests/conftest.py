"""Only the handlers of the test exist; workers run in threads of the test process."""

from tests.committing import quick_flush  # noqa: F401  (a fixture)
from tests.worker.conftest import registry, said, start  # noqa: F401  (fixtures)
