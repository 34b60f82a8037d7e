"""Several clients that order at once, over HTTP, as the storefront's pages would."""

import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Purchase:
    """The order of one customer; with `cancel` the customer cancels it later."""

    product: int
    quantity: int
    email: str
    cancel: bool = False


def plan(orders: int, products: list[int], sold_out: int) -> list[Purchase]:
    """Return that many purchases, and between them some of a product that is sold out.

    The same each time. Of 100: one address in 20 refuses the first attempt, one in 50 the first
    two; in all, one does not exist; one order in 50 is cancelled.

    >>> shopping = plan(100, products=[1, 2], sold_out=3)
    >>> sum(each.product == 3 for each in shopping), sum(each.cancel for each in shopping)
    (4, 2)
    """
    shopping = []
    for number in range(orders):
        email = f"customer-{number}@example.com"
        if number == orders // 2:
            email = "bounce@example.com"
        elif number % 50 == 7:
            email = "flaky+2@example.com"
        elif number % 20 == 3:
            email = "flaky+1@example.com"
        product, quantity = products[number % len(products)], 1 + number % 5
        shopping.append(Purchase(product, quantity, email, cancel=number % 50 == 11))
        if number % 25 == 24:
            shopping.append(Purchase(sold_out, 1, email))
    return shopping


class Customers:
    """`clients` threads that work off one shopping list, each over a connection of its own.

    `rate` purchases a second are begun, or as many as the shop can answer if that is fewer.
    """

    def __init__(
        self, address: str, shopping: Sequence[Purchase], *, clients: int, rate: float, run: str
    ) -> None:
        self.address = urlsplit(address).netloc
        self.run = run
        self.pause = 1 / rate
        self.answers: Counter[int] = Counter()  # by HTTP status
        self.errors: list[str] = []
        self._list = iter(enumerate(shopping))
        self._turn = threading.Lock()
        # Daemons: nothing waits for them when the demo is interrupted.
        self._threads = [
            threading.Thread(target=self._shop, name=f"client-{number}", daemon=True)
            for number in range(clients)
        ]

    def start(self) -> None:
        self._opened = time.monotonic()
        for thread in self._threads:
            thread.start()

    @property
    def busy(self) -> bool:
        """Whether a client is still ordering."""
        return any(thread.is_alive() for thread in self._threads)

    def _shop(self) -> None:
        connection = HTTPConnection(self.address, timeout=30)
        while True:
            with self._turn:
                number, purchase = next(self._list, (0, None))
            if purchase is None:
                break
            time.sleep(max(0.0, self._opened + number * self.pause - time.monotonic()))
            try:
                self._buy(connection, purchase)
            except (OSError, HTTPException, ValueError) as error:
                # Not sent again: whether the order exists is what the ledger will tell.
                self.errors.append(f"{type(error).__name__}: {error}")
                connection.close()
        connection.close()

    def _buy(self, connection: HTTPConnection, purchase: Purchase) -> None:
        order = {
            "product": purchase.product,
            "quantity": purchase.quantity,
            "email": purchase.email,
            "run": self.run,
        }
        status, answer = self._post(connection, "/orders/", order)
        with self._turn:
            self.answers[status] += 1
        if status == 201 and purchase.cancel:
            path = f"/orders/{answer['order']}/cancel/"
            status, _ = self._post(connection, path, {"email": purchase.email})
        if status >= 500:
            self.errors.append(f"the shop answered {status}")

    def _post(
        self, connection: HTTPConnection, path: str, body: dict[str, object]
    ) -> tuple[int, dict[str, int]]:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        content = response.read()
        return response.status, json.loads(content) if response.status < 500 else {}
