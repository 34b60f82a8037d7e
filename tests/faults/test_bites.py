"""The suite notices deliberate breakage; `python -m tests.faults bite` tries every patch."""

from __future__ import annotations

import pytest

from tests.faults.bite import bite
from tests.faults.patches import PATCHES, Code, PatchLost, Text
from tests.faults.sweep import Runner
from tests.samples import SEED
from tests.slow import slow

#: Noticed because something happens, not because it never does. `.ci/run all` applies every patch.
QUICK = ("delete-first", *slow("no-fence"))


@pytest.mark.parametrize("patch", QUICK)
def test_a_broken_package_is_caught(runner: Runner, patch: str) -> None:
    """Guarantee 22."""
    (found,) = bite([runner], [patch], seed=SEED, enough=1)
    assert found.caught, str(found)


@pytest.mark.parametrize(
    "change",
    [
        Text("django_mq.exceptions", "no such text", ""),
        Code("django_mq.exceptions", "MQError.no_such_method", "x", ""),
        Code("django_mq.worker", "Worker.run", "no such text", ""),
        Code("django_mq.no_such_module", "x", "x", ""),
        Code("django_mq.worker", "Worker.run", "with self.lock:", "with self.no_such_lock:"),
    ],
)
def test_patch_without_its_target_raises(change: Text | Code) -> None:
    with pytest.raises(PatchLost, match=r"no such|no_such"):
        change.find()


@pytest.mark.parametrize("patch", PATCHES)
def test_every_patch_finds_its_target(patch: str) -> None:
    for change in PATCHES[patch].changes:
        change.find()


def test_a_package_that_cannot_be_broken_is_not_taken_for_a_catch(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner does not know this patch, so no worker starts there."""
    monkeypatch.setitem(PATCHES, "unknown", PATCHES["application-clock"])
    with pytest.raises(RuntimeError, match="cannot be run"):
        bite([runner], ["unknown"], seed=SEED, enough=1)
