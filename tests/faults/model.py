"""A model of the system in a few lines of Python: no SQL, no time, no concurrency.

A message carries a script with an action for each attempt. `Model.drain` runs every message that
may run and knows which are left. The state machine of `test_model.py` compares it with the tables
after every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

#: Attempts per message.
ATTEMPTS = 3
#: The queues, and the unit in each that runs one at a time.
PLAIN, KEYED, LINE = "model.plain", "model.keyed", "model.line"
QUEUES = (PLAIN, KEYED, LINE)

WAITING, DELAYED, LEASED, DEAD = "waiting", "delayed", "leased", "dead"
#: The actions of an attempt; the last one of a script repeats.
ACTS = ("ack", "fail", "retry", "snooze", "reject", "broadcast")


@dataclass
class Modelled:
    """One message; `state` is waiting, delayed, leased by a dead worker, or dead.

    A handler's broadcast has the negated id of the handler's message.
    """

    id: int
    queue: str
    script: tuple[str, ...]
    key: str | None = None
    unique_id: str | None = None
    state: str = WAITING
    attempts: int = 0
    max_attempts: int = ATTEMPTS
    lapsed: bool = False

    @property
    def act(self) -> str:
        """The action of the present attempt."""
        return self.script[min(self.attempts, len(self.script)) - 1]

    @property
    def row(self) -> tuple[str, str, int, int]:
        """The expected row in the table."""
        return (self.queue, self.state, self.attempts, self.max_attempts)


@dataclass
class Model:
    """The messages by id, their effects, and the number of failed attempts."""

    messages: dict[int, Modelled] = field(default_factory=dict)
    paused: set[str] = field(default_factory=set)
    effects: Counter[int] = field(default_factory=Counter)
    failures: int = 0

    def add(self, message: Modelled) -> None:
        self.messages[message.id] = message

    def taker(self, queue: str, unique_id: str | None) -> Modelled | None:
        """Return the message that has the unique id, if it is taken."""
        if unique_id is None:
            return None
        alike = (m for m in self.messages.values() if (m.queue, m.unique_id) == (queue, unique_id))
        return next((each for each in alike if each.state != DEAD), None)

    def drain(self) -> None:
        """Run until no message may run."""
        while message := next(filter(self.may_start, self.messages.values()), None):
            self.start(message)
            if message.state == LEASED:
                self._run(message)

    def select(self, states: Sequence[str]) -> list[int]:
        return sorted(each.id for each in self.messages.values() if each.state in states)

    def may_start(self, message: Modelled) -> bool:
        if message.queue in self.paused:
            return False
        if not (message.state == WAITING or (message.state == LEASED and message.lapsed)):
            return False
        return not any(self._precedes(each, message) for each in self.messages.values())

    def _precedes(self, other: Modelled, message: Modelled) -> bool:
        """Say whether `message` must wait for `other`: a dead head blocks, too."""
        if other.queue != message.queue or message.queue == PLAIN or other is message:
            return False
        if message.queue == KEYED and (message.key is None or other.key != message.key):
            return False
        return other.id < message.id or other.state == LEASED

    def start(self, message: Modelled) -> None:
        """Begin an attempt; one that vanished with its worker has failed."""
        if message.lapsed:
            self.failures += 1
            message.lapsed = False
            if message.attempts >= message.max_attempts:
                message.state = DEAD
                return
        message.state = LEASED
        message.attempts += 1

    def _run(self, message: Modelled) -> None:
        act = message.act
        if act in ("ack", "broadcast"):
            self.effects[message.id] += 1
            del self.messages[message.id]
            if act == "broadcast":
                self.add(Modelled(-message.id, PLAIN, ("ack",)))
        elif act == "snooze":
            message.attempts -= 1
            message.state = DELAYED
        else:
            self.failures += 1
            spent = message.attempts >= message.max_attempts
            message.state = DEAD if spent or act == "reject" else DELAYED
