from oscar.core.loading import get_model

from django_mq import Delivery, handler


@handler("shop.orders.placed", queue="orders")
def note(delivery: Delivery) -> None:
    get_model("order", "OrderNote").objects.create(
        order_id=delivery.payload["order_id"], message="handled"
    )
