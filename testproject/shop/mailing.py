"""Sends letters as files or by SMTP, and imitates a mail server that fails as real ones do.

With `EMAIL_URL` letters go to that server. Otherwise a letter lies in `settings.SHOP_LETTERS`
(default `.mail`), as `<run of the demo>/order-<id>.eml`.

Two kinds of addresses have trouble:

- `flaky+2@...` is refused twice and then accepted, as by servers that greylist strangers;
- `bounce@...` does not exist.
"""

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from smtplib import SMTPConnectError, SMTPRecipientsRefused, SMTPServerDisconnected
from typing import Any

from django.conf import settings
from django.core.mail import EmailMessage, get_connection
from django.core.mail.backends.filebased import EmailBackend

from .models import Order


class MailServerBusy(Exception):
    """The server is busy: another attempt may succeed."""


class MailServerAway(Exception):
    """There is no connection, so the letter was not tried."""


class NoSuchMailbox(Exception):
    """The mailbox does not exist: another attempt would fail too."""


#: A wrong password, say, is none of these: that fails.
_AWAY = (ConnectionError, TimeoutError, SMTPConnectError, SMTPServerDisconnected)


def directory(run: str) -> Path:
    """Return where the letters of a run are."""
    root = getattr(settings, "SHOP_LETTERS", settings.BASE_DIR / ".mail")
    return Path(root, run)


def confirmation(order: Order) -> EmailMessage:
    """Write the letter that tells a customer that an order has arrived."""
    return EmailMessage(
        subject=f"Your order {order.pk}",
        body=f"Thank you for ordering {order.quantity} x {order.product.name}.\n",
        from_email="shop@example.com",
        to=[order.email],
        # The same each time, so that whoever gets it twice can tell. (Without it, Django would
        # ask the network for this host's name.)
        headers={"Message-ID": f"<order-{order.pk}@shop.example.com>"},
    )


def has_server() -> bool:
    """Return whether the settings name a mail server: Django's own default is one, too."""
    is_smtp = settings.EMAIL_BACKEND == "django.core.mail.backends.smtp.EmailBackend"
    return is_smtp and settings.is_overridden("EMAIL_HOST")


@contextmanager
def connection() -> Iterator[Callable[..., object]]:
    """Yield what sends letters: by SMTP over one connection, else as files, which need none.

    Both raise MailServerBusy or NoSuchMailbox; without a connection, MailServerAway.
    """
    if not has_server():
        yield send
        return
    server = get_connection()
    with suppress(*_AWAY):  # each letter will say so
        server.open()
    try:
        yield partial(submit, server)
    finally:
        server.close()


def submit(server: Any, order: Order, *, attempt: int) -> None:
    """Send the confirmation of `order` by an open connection.

    A second time it has the same Message-ID, by which most mail programs show one letter.
    """
    # smtplib forgets a connection that the server ended: at the letter before, say.
    if server.connection is None or server.connection.sock is None:
        raise MailServerAway(f"no connection to the mail server: {order.email}")
    _trouble(order.email, attempt)
    try:
        server.send_messages([confirmation(order)])
    except SMTPRecipientsRefused as error:
        # Below 500 is "not now".
        [(code, text)] = error.recipients.values()
        refused = f"{code} {text.decode(errors='replace')}: {order.email}"
        raise (NoSuchMailbox if code >= 500 else MailServerBusy)(refused) from error


def send(order: Order, *, attempt: int) -> Path:
    """Write the confirmation of `order` to its file and return that.

    A second time it replaces the same file, so a handler that runs again (as one that is not
    atomic may) sends no second letter. With a mail provider, its idempotency key does that.
    """
    _trouble(order.email, attempt)
    letters = directory(order.run)
    letters.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed when complete: a crash in between leaves no half letter.
    with tempfile.TemporaryDirectory(dir=letters, prefix=".draft-") as draft:
        EmailBackend(file_path=draft).send_messages([confirmation(order)])
        [written] = Path(draft).iterdir()
        return written.replace(letters / f"order-{order.pk}.eml")


def _trouble(email: str, attempt: int) -> None:
    """Fail like the servers of these addresses."""
    if email.startswith("bounce@"):
        raise NoSuchMailbox(f"550 no such mailbox: {email}")
    if (flaky := re.match(r"flaky\+(\d)@", email)) and attempt <= int(flaky[1]):
        raise MailServerBusy(f"451 try again later: {email}")
