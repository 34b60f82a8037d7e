"""`manage.py mq_demo`: the shop, its customers and two workers; then a count that must add up."""

import contextlib
import secrets
import shutil
import signal
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError, connection
from django.utils import timezone

from django_mq import queues
from django_mq.models import Schedule, WorkerHeartbeat
from testproject.shop import mailing
from testproject.shop.demo.books import Books
from testproject.shop.demo.customers import Customers, Purchase, plan
from testproject.shop.demo.processes import Processes, Trouble
from testproject.shop.demo.screen import Screen
from testproject.shop.handlers import REPORTS
from testproject.shop.models import Product

CATALOGUE = {"tea": "4.50", "teapot": "38.00", "cup": "9.90", "kettle": "54.00", "sugar": "2.20"}
SOLD_OUT = {"samovar": "420.00"}
PATIENCE = 45  # seconds without any progress; a lost lease takes 30
ADMIN = "mq_demo"


class Command(BaseCommand):
    help = "Run a small shop under load, with two workers, and count: nothing lost, nothing twice."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--orders", type=int, default=200, help="default: 200")
        parser.add_argument("--clients", type=int, default=8, help="at once; default: 8")
        parser.add_argument("--rate", type=float, default=25, help="orders a second; default: 25")
        parser.add_argument("--workers", type=int, default=2, help="processes; default: 2")
        parser.add_argument(
            "--keep", action="store_true", help="leave shop, workers and admin running until Ctrl-C"
        )

    def handle(self, **options: Any) -> None:
        if min(options["orders"], options["clients"], options["workers"], options["rate"]) <= 0:
            raise CommandError("--orders, --clients, --workers and --rate are above zero")
        logs = Path(tempfile.mkdtemp(prefix="mq_demo-"))
        try:
            with ended_by_signals(), Processes(logs) as processes:
                self.demonstrate(processes, **options)
        except Trouble as trouble:
            raise CommandError(f"{trouble}\nAll logs: {logs}") from None
        except (KeyboardInterrupt, DatabaseError) as error:
            if not was_interrupted(error):
                raise
            self.stderr.write("\nInterrupted. Everything that was started has ended.")
            shutil.rmtree(logs)
            sys.exit(130)
        shutil.rmtree(logs)

    def demonstrate(
        self,
        processes: Processes,
        *,
        orders: int,
        clients: int,
        rate: float,
        workers: int,
        keep: bool,
        **_: Any,
    ) -> None:
        """Do all of it. Raises Trouble if a process fails or the count does not add up."""
        run = f"{timezone.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
        screen = Screen(self.stdout, self.style)
        screen.title("django_mq: a shop, its customers and its workers")
        screen.say("database", self.database())
        shopping = self.stock(orders)

        books = Books.open(run)
        # Django's own server: threads, so that clients are served at once; static files, so that
        # the admin looks as it should. Port 0: the system picks a free one, and it says which.
        processes.start("web", "runserver", "127.0.0.1:0", "--noreload", "--insecure")
        processes.start("workers", "mq_worker", "--processes", f"{workers}")
        address = processes.wait_for(lambda: processes.address("web"), "The web server")
        screen.say("shop", f"{address}  (run {run})")
        fleet = WorkerHeartbeat.objects.filter(started_at__gte=books.opened)
        processes.wait_for(lambda: fleet.count() >= workers, f"{workers} workers")
        screen.say("workers", f"{workers} processes of manage.py mq_worker")
        screen.say("customers", f"{clients} at once, {len(shopping)} orders, some of them hopeless")
        self.stdout.write("")

        customers = Customers(address, shopping, clients=clients, rate=rate, run=run)
        with reporting(processes):
            seconds = self.watch(processes, books, customers, screen, orders)
        ledger = books.balance(customers.answers, seconds)
        screen.table(ledger.rows())
        where = settings.EMAIL_HOST if mailing.has_server() else mailing.directory(run)
        self.stdout.write(f"  The letters: {where}")
        if not ledger.adds_up:
            raise Trouble(f"It does not add up.\n{processes.last_words()}")
        self.stdout.write(self.style.SUCCESS("  It adds up: nothing lost, nothing twice."))
        if keep:
            self.keep(processes, address)
        else:
            self.stdout.write("  With --keep everything stays up, with the admin to look around.")

    def database(self) -> str:
        """Bring the tables up to date and say which database it is."""
        call_command("migrate", verbosity=0, interactive=False)
        major, minor = divmod(connection.pg_version, 10000)
        place = "embedded" if settings.DATABASES["default"]["ENGINE"].endswith("embedded") else ""
        name = place or f"database {connection.settings_dict['NAME']}"
        return f"PostgreSQL {major}.{minor}, {name}, migrated"

    def stock(self, orders: int) -> list[Purchase]:
        """Fill the shelves for that many orders and return the customers' shopping list."""
        ids = {}
        for name, price in (CATALOGUE | SOLD_OUT).items():
            stock = 0 if name in SOLD_OUT else 20 * orders
            values = {"price": price, "stock": stock}
            ids[name] = Product.objects.update_or_create(name=name, defaults=values)[0].pk
        [sold_out] = (ids[name] for name in SOLD_OUT)
        return plan(orders, [ids[name] for name in CATALOGUE], sold_out)

    def watch(
        self, processes: Processes, books: Books, customers: Customers, screen: Screen, orders: int
    ) -> float:
        """Run the customers, show the progress until no message waits, and return the duration."""
        started = moved = time.monotonic()
        before = None
        customers.start()
        while True:
            # Asked before the tables are: an order that is placed in between is not overlooked.
            busy = customers.busy
            now = books.progress()
            seconds = time.monotonic() - started
            screen.progress(now, orders, seconds)
            processes.check()
            if customers.errors:
                raise Trouble(f"A request failed: {customers.errors[0]}\n{processes.last_words()}")
            if not busy and not now.waiting and now.reports:
                return seconds
            reached = now._replace(reports=min(now.reports, 1))  # reports never end
            if reached != before:
                before, moved = reached, time.monotonic()
            elif time.monotonic() - moved > PATIENCE:
                return seconds  # the count will say what is missing
            time.sleep(0.25)

    def keep(self, processes: Processes, address: str) -> None:
        """Show the way into the admin and stay until Ctrl-C."""
        password = secrets.token_urlsafe(9)
        users = get_user_model()._default_manager
        user, _ = users.get_or_create(
            username=ADMIN, defaults={"is_staff": True, "is_superuser": True}
        )
        user.set_password(password)
        user.save()
        self.stdout.write(f"\n  admin     {address}/admin/  login {ADMIN}  password {password}")
        self.stdout.write("  Ctrl-C ends it.")
        self.stdout.flush()
        try:
            while True:
                processes.check()
                time.sleep(0.5)
        except KeyboardInterrupt:
            self.stdout.write("\n  Ending.")


@contextlib.contextmanager
def reporting(processes: Processes) -> Iterator[None]:
    """Enable the schedule of the reports in the block; it is off between demos."""
    stored = Schedule.objects.filter(name=REPORTS)
    processes.wait_for(stored.exists, "The schedule, which a worker stores")
    try:
        queues.enable_schedule(REPORTS)
        yield
    finally:
        connection.close()  # an interrupt may have left a query unfinished
        queues.disable_schedule(REPORTS)


def was_interrupted(error: BaseException | None) -> bool:
    """Return whether a signal led to `error`; Django reports the transaction that it spoiled."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Treat SIGHUP and SIGTERM like Ctrl-C: shut down in order."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # as under nohup
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
