"""The wait for a lost database, and its log lines."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from time import monotonic

import psycopg
from django.db.utils import Error as DjangoError
from psycopg.errors import LockNotAvailable

from django_mq.conf.error_logs import error_name
from django_mq.policy.missing_right import is_missing_right
from django_mq.policy.plain_text import one_line
from django_mq.store.limits import STATEMENT_SECONDS
from django_mq.store.server_errors import LOST, is_lost, is_read_only, was_refused

logger = logging.getLogger("django_mq")

#: Parts of the texts, in English, with which a server refuses a connection because it has too many.
_TOO_MANY = ("too many clients", "too many connections", "connection slots are reserved")
#: The advice for such a refusal.
MORE_CONNECTIONS = (
    "lower --processes or --threads, or raise max_connections or the CONNECTION LIMIT of the role"
)
#: The advice for a wait for a lock.
WHO_LOCKS = "mq_doctor names the session that has a table locked"

#: Seconds between two attempts to reach a lost database: the first wait, and the longest.
RECONNECT_WAIT, MAX_RECONNECT_WAIT = 0.25, 5.0
#: A thread that still fails does so within this many seconds after its wait.
RETRY_SECONDS = 2.0
#: Seconds after an outage in which a thread that did not meet it may find its connection dead.
DEAD_SECONDS = 60.0


def reason_of(error: BaseException) -> str:
    """Return how a log line describes a lost database: in the words of the server or the driver.

    The text of any other error may quote a row, so `error_name()` says which it is.

    >>> from psycopg import OperationalError, errors
    >>> reason_of(errors.ReadOnlySqlTransaction("cannot execute UPDATE"))
    'the server is read only, as a standby is: cannot execute UPDATE'
    >>> reason_of(OperationalError("FATAL: sorry, too many clients already")).partition("; ")[2]
    'lower --processes or --threads, or raise max_connections or the CONNECTION LIMIT of the role'
    >>> reason_of(errors.LockNotAvailable("canceling statement due to lock timeout"))
    'canceling statement due to lock timeout; mq_doctor names the session that has a table locked'
    """
    text = one_line(str(error), 200) if is_lost(error) else ""
    if is_read_only(error):
        return f"the server is read only, as a standby is: {text}"
    if has_too_many_connections(text):
        return f"{text}; {MORE_CONNECTIONS}"
    if isinstance(error, LockNotAvailable):
        return f"{text}; {WHO_LOCKS}"
    return text or error_name(error)


def has_too_many_connections(text: str) -> bool:
    """Return whether a server refused a connection with this text because it has too many.

    libpq does not pass on the SQLSTATE of such a refusal.
    """
    return any(each in text for each in _TOO_MANY)


def _is_refusal(error: BaseException) -> bool:
    return not isinstance(error, LOST) or was_refused(error)


def log_wait(error: BaseException, wait: float, *, what: str = "") -> None:
    """Log that after `error` the next attempt comes in `wait` seconds; `what` begins the line."""
    refused = _is_refusal(error)
    logger.warning(
        "%s%s (%s); trying again in %.2g s",
        what,
        "the database refused a statement" if refused else "database lost",
        reason_of(error),
        wait,
        extra={"event": "statement_refused" if refused else "database_lost"},
    )


@dataclass(slots=True)
class _GrowingWait:
    """How long the threads of a process wait, and when the last wait was logged."""

    seconds: float = RECONNECT_WAIT
    logged_at: float = float("-inf")

    def next(self, now: float) -> tuple[float, bool]:
        """Return the seconds to wait, and whether to log that: once per wait, which then doubles.

        >>> growing = _GrowingWait()
        >>> growing.next(0.0), growing.next(0.3), growing.next(0.5)
        ((0.25, True), (0.5, False), (0.5, True))
        """
        wait, due = self.seconds, now - self.logged_at >= self.seconds
        if due:
            self.logged_at = now
            self.seconds = min(wait * 2, MAX_RECONNECT_WAIT)
        return wait, due


class Outage:
    """The outage of a process: its threads wait here for a lost database, with one log line.

    It is over once a thread that lost the database gets an answer. The answers that other threads
    get do not count while that thread fails: a server may keep their connections, and refuse it a
    new one. A thread that was idle may find only later that the outage has cut its connection: it
    tries again soon, and within DEAD_SECONDS that is not logged as another outage.
    """

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._lock = threading.Lock()
        self._lost_wait = _GrowingWait()
        # Other threads, which do not need the right, go on: their answers must not reset this wait.
        self._right_wait = _GrowingWait()
        self._lost = self._logged = False
        # The threads that met this outage or the last one, and when that one was over.
        self._met_by: set[int] = set()
        self._over_at = float("-inf")
        # Until when each thread that lost the database will have tried again.
        self._tries_until: dict[int, float] = {}
        # The same for each thread that met a refusal. Its next statement may wait for a lock.
        self._refused: dict[int, float] = {}

    def wait(self, error: BaseException, *, logged: bool = False) -> None:
        """Log at most once per wait, then sleep until the next attempt is due or the drain is over.

        After a refused statement the thread waits in the same way, but that is not an outage: it is
        over once each thread that met a refusal gets an answer, or no longer tries. After a bug of
        ours the thread waits, too. `logged`: the caller has logged it.
        """
        thread = threading.get_ident()
        with self._lock:
            now = monotonic()
            late = not _is_refusal(error) and self._is_late(thread, now)
            wait, says = (RECONNECT_WAIT, False) if late else self._wait_of(error).next(now)
            if not _is_refusal(error):
                self._lost = self._lost or says or late
                self._logged = self._logged or says
                self._tries_until[thread] = now + wait + RETRY_SECONDS
            elif isinstance(error, psycopg.Error | DjangoError):
                self._refused[thread] = now + wait + STATEMENT_SECONDS
        if says and not logged:  # without the lock: a log handler may block
            log_wait(error, wait)
        self._stop.wait(wait)

    def _is_late(self, thread: int, now: float) -> bool:
        """Return whether `thread` has only now met an outage that another thread met before.

        The outage may be over: it has cut the connection of this thread, too.
        """
        if not self._lost and (thread in self._met_by or now - self._over_at > DEAD_SECONDS):
            self._met_by.clear()  # another outage begins
        late = bool(self._met_by) and thread not in self._met_by
        self._met_by.add(thread)
        return late

    def _wait_of(self, error: BaseException) -> _GrowingWait:
        if not is_missing_right(error):
            return self._lost_wait
        if monotonic() - self._right_wait.logged_at > 2 * MAX_RECONNECT_WAIT:
            self._right_wait = _GrowingWait()  # nothing has lacked a right for a while
        return self._right_wait

    def wait_quietly(self) -> None:
        """Sleep for the first wait, or until the drain is over."""
        self._stop.wait(RECONNECT_WAIT)

    @property
    def lost(self) -> bool:
        """Whether the database is lost, as far as this process knows."""
        return self._lost

    def stopped(self) -> bool:
        """Return whether the drain is over: then nothing waits for the database any longer."""
        return self._stop.is_set()

    def record_answer(self) -> None:
        """Note that the database has answered this thread.

        If that ends the outage, the next one begins with a short wait again.
        """
        if not (self._lost or self._refused) and self._lost_wait.seconds == RECONNECT_WAIT:
            return
        back = False
        with self._lock:
            accepts = bool(self._refused) and _is_over(self._refused)
            if _is_over(self._tries_until):
                self._lost_wait.seconds = RECONNECT_WAIT
                if self._lost:
                    self._over_at = monotonic()
                back, self._lost, self._logged = self._logged, False, False
        if back:
            logger.info("database is back", extra={"event": "database_back"})
        elif accepts:
            text = "the database accepts statements again"
            logger.info(text, extra={"event": "statement_accepted"})


def _is_over(tries_until: dict[int, float]) -> bool:
    """Remove this thread, which has got an answer; return whether no other is to try again."""
    tries_until.pop(threading.get_ident(), None)
    now = monotonic()
    if not any(until > now for until in tries_until.values()):
        tries_until.clear()
    return not tries_until
