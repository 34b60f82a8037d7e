"""A module that only OPTIONS["modules"] names."""

from tests.contrib.tasks.jobs import task


@task
def extra() -> None: ...
