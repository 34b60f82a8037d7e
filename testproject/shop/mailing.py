"""Letters as files, and a mail server that fails as real ones do.

A letter lies in `settings.SHOP_LETTERS` (default `.mail`), as `<run of the demo>/order-<id>.eml`.
Two kinds of addresses have trouble:

- `flaky+2@...` is refused twice and then accepted, as by servers that greylist strangers;
- `bounce@...` does not exist.
"""

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from django.conf import settings
from django.core.mail import EmailMessage
from django.core.mail.backends.filebased import EmailBackend

from .models import Order


class MailServerBusy(Exception):
    """Not now: worth another attempt."""


class NoSuchMailbox(Exception):
    """Never: another attempt would end the same."""


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


@contextmanager
def connection() -> Iterator[Callable[..., Path]]:
    """Yield what sends letters over one connection, as `with get_connection()` does by SMTP.

    Letters that are files need none, so there is nothing to log in to here.
    """
    yield send


def send(order: Order, *, attempt: int) -> Path:
    """Send the confirmation of `order` and return its file.

    A second time it replaces the same file, so a handler that runs again (as one that is not
    atomic may) sends no second letter. With a mail provider, its idempotency key does that.
    Raises MailServerBusy or NoSuchMailbox.
    """
    if order.email.startswith("bounce@"):
        raise NoSuchMailbox(f"550 no such mailbox: {order.email}")
    if (flaky := re.match(r"flaky\+(\d)@", order.email)) and attempt <= int(flaky[1]):
        raise MailServerBusy(f"451 try again later: {order.email}")
    letters = directory(order.run)
    letters.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed when complete: a crash in between leaves no half letter.
    with tempfile.TemporaryDirectory(dir=letters, prefix=".draft-") as draft:
        EmailBackend(file_path=draft).send_messages([confirmation(order)])
        [written] = Path(draft).iterdir()
        return written.replace(letters / f"order-{order.pk}.eml")
