"""Ways to break the package on purpose: each must be caught, or the suite does not bite.

A patch is data: a module, a place in it, a text and its replacement. A patch that does not find its
text fails with a message that says so: update its line here after moving the code.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from dataclasses import dataclass
from types import ModuleType
from typing import Any


class PatchLost(Exception):
    """The text that a patch replaces has moved or changed."""


@dataclass(frozen=True, slots=True)
class Text:
    """Replaces a fragment of each text constant of `module` that contains it, mostly SQL."""

    module: str
    old: str
    new: str

    def find(self) -> dict[str, str]:
        """Return the constants that have the fragment; raises PatchLost if none has."""
        found = {
            name: value
            for name, value in vars(_module(self.module)).items()
            if isinstance(value, str) and not name.startswith("__") and self.old in value
        }
        if not found:
            raise PatchLost(f"no constant of {self.module} has {self.old!r} any more")
        return found

    def apply(self) -> None:
        for name, value in self.find().items():
            setattr(_module(self.module), name, value.replace(self.old, self.new))


@dataclass(frozen=True, slots=True)
class Code:
    """Replaces a fragment of the source of a function or a method of `module`."""

    module: str
    name: str
    old: str
    new: str

    def find(self) -> tuple[Any, str, str]:
        """Return the owner of the function, its name and its source; raises PatchLost."""
        owner: Any = _module(self.module)
        *path, last = self.name.split(".")
        for step in path:
            owner = getattr(owner, step, None)
        function = getattr(owner, last, None)
        source = textwrap.dedent(inspect.getsource(function)) if function else ""
        if self.old not in source:
            raise PatchLost(f"{self.module}: {self.name} has no {self.old!r} any more")
        known = re.findall(r"\w+", inspect.getsource(owner))
        for attribute in re.findall(r"self\.(\w+)", self.new):
            if attribute not in known:  # it would fail, and not do what the patch says
                raise PatchLost(f"{self.module}: {self.name} has no self.{attribute} any more")
        return owner, last, source

    def apply(self) -> None:
        owner, name, source = self.find()
        text = "from __future__ import annotations\n" + source.replace(self.old, self.new)
        made: dict[str, Any] = {}
        exec(compile(text, f"<{self.name}>", "exec"), vars(_module(self.module)), made)  # noqa: S102
        setattr(owner, name, made[name])


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise PatchLost(f"there is no module {name} any more") from None


@dataclass(frozen=True, slots=True)
class Patch:
    """`changes` break the package; `points` of these `scenarios` and `kinds` should notice it."""

    says: str
    changes: tuple[Text | Code, ...]
    scenarios: tuple[str, ...]
    kinds: tuple[str, ...]
    points: int = 8


PATCHES = {
    "no-fence": Patch(
        "settle without fence: whoever knows the id removes the message",
        (
            Text(
                "django_mq.store.settle",
                "\n where m.id = %(id)s and m.attempts = %(attempt)s"
                " and m.claimed_by = %(claimer)s\n",
                "\n where m.id = %(id)s\n",
            ),
        ),
        ("finishes",),
        ("freeze-inside",),
        points=8,
    ),
    "two-commits": Patch(
        "the effect commits in one transaction, the ack in the next",
        (
            Code(
                "django_mq.executor.slices",
                "SliceRunner.run",
                "            self._settle_bound(state)",
                "        with self._session.block():\n            self._settle_bound(state)",
            ),
        ),
        ("writes",),
        ("tree-commit",),
        points=100,  # all points: which of the commits is one of the two depends on timing
    ),
    "delete-first": Patch(
        "the message is removed before its handler runs",
        (
            Code(
                "django_mq.executor.nonatomic",
                "NonAtomic._run_started",
                "    timeout.extend(tasks[0].timeout)\n",
                "    timeout.extend(tasks[0].timeout)\n"
                "    self.settlement.settle([Ended(call.deliveries[0], Settled.ACKED)])\n",
            ),
        ),
        ("calls",),
        ("tree-before", "child-before"),
        points=12,
    ),
    "no-skip-locked": Patch(
        "claim without SKIP LOCKED",
        (
            Text(
                "django_mq.store.claim",
                "for no key update of m skip locked",
                "for no key update of m",
            ),
        ),
        ("writes",),
        ("held",),
    ),
    "no-tie-break": Patch(
        "claim without a tie-break: what is due at the same moment comes in any order",
        (
            Text(
                "django_mq.store.claim",
                "order by m.processable_after, m.id",
                "order by m.processable_after, random()",
            ),
        ),
        ("writes", "reads", "unused", "mixed"),
        ("none",),
    ),
    "no-renewal": Patch(
        "leases are not renewed, and no heartbeat stands in for one",
        (
            Code(
                "django_mq.worker.lease_renewal",
                "LeaseRenewal.renew",
                "skip_refused_rows(",
                "(lambda *a, **k: set())(",
            ),
            Text(
                "django_mq.store.claim_lapsed",
                "w.last_seen > statement_timestamp()",
                "w.last_seen > statement_timestamp() + interval '1 day'",
            ),
        ),
        ("long",),
        ("twins",),
    ),
    "application-clock": Patch(
        "what is due is decided by the clock of a host that is two days fast",
        (
            Text(
                "django_mq.store.claim",
                "m.processable_after <= statement_timestamp()",
                "m.processable_after <= statement_timestamp() + interval '2 days'",
            ),
        ),
        ("writes",),
        ("none",),
    ),
    "notify-only": Patch(
        "NOTIFY is the only wake-up",
        (
            Code(
                "django_mq.worker.wakeup",
                "Wakeup.sleep",
                "timeout=max(0.0, seconds)",
                "timeout=3600",
            ),
        ),
        ("writes",),
        ("deaf",),
    ),
    "charged-unstarted": Patch(
        "the loss of a host charges messages that had not started",
        (Text("django_mq.store.claim_lapsed", "m.unstarted_claim = m.claimed_by", "false"),),
        ("calls",),
        ("tree-after",),
    ),
    "unrecorded-start": Patch(
        "the start of a handler outside transactions is not recorded",
        (Text("django_mq.store.leases", "unstarted_claim = null, ", ""),),
        ("calls",),
        ("tree-after",),
    ),
    "counted-after": Patch(
        "an attempt counts when it ended: one that kills its process never does",
        (
            Code(
                "django_mq.worker.recovery",
                "Recovery.settle",
                "kept=[fence.id for fence in dead.charged]",
                "kept=[]",
            ),
        ),
        ("writes", "calls"),
        ("child-inside",),
    ),
    "no-refund": Patch(
        "what a drain gives back keeps the attempt that the claim charged",
        (
            Text(
                "django_mq.store.settle",
                "claimed_by = null, attempts = attempts - 1\n where id = any(",
                "claimed_by = null\n where id = any(",
            ),
        ),
        ("writes", "calls", "coroutines"),
        ("term",),
        points=24,
    ),
    "neighbours-again": Patch(
        "the failure of a neighbour runs again what used nothing",
        (
            Code(
                "django_mq.executor.slices",
                "SliceRunner.run",
                "    if state.unbound.ended:",
                "    if state.aborted:\n"
                "        state.to_rerun.extend(state.unbound.tasks)\n"
                "    elif state.unbound.ended:",
            ),
        ),
        ("neighbours",),
        ("none",),
    ),
}


def apply(name: str) -> None:
    """Break this process by the patch `name`; an empty name leaves it intact.

    Raises PatchLost, which names the line to update here.
    """
    if name:
        for change in PATCHES[name].changes:
            try:
                change.apply()
            except PatchLost as lost:
                raise PatchLost(f"patch {name!r} in {__file__}: {lost}") from None
