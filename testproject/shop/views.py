"""The storefront's JSON API.

GET  /                   the catalogue
POST /orders/            {"product": 1, "quantity": 2, "email": "ada@example.com"}
POST /orders/17/cancel/  {"email": "ada@example.com"}
"""

import json
from typing import Any

from django.db import transaction
from django.db.models import F
from django.forms import modelform_factory
from django.http import HttpRequest, JsonResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_POST

from django_mq import broadcast

from .models import Order, Product

OrderForm = modelform_factory(Order, fields=("product", "quantity", "email", "run"))


class OutOfStock(Exception):
    """The stock is smaller than the order."""


@require_GET
def catalogue(request: HttpRequest) -> JsonResponse:
    products = Product.objects.order_by("pk").values("id", "name", "price", "stock")
    return JsonResponse({"products": list(products)})


# Exempt from CSRF because no cookie says who orders: a forged request could borrow nothing.
@csrf_exempt
@require_POST
def place_order(request: HttpRequest) -> JsonResponse:
    """Store an order and broadcast it, or do neither."""
    form = OrderForm(_sent(request))
    if not form.is_valid():
        return JsonResponse({"errors": form.errors}, status=400)
    order = form.save(commit=False)
    order.price = order.product.price
    try:
        with transaction.atomic():
            order.save()
            broadcast("shop.orders.placed", _facts(order))
            # Last, because it locks the product: the others wait for it until our commit.
            # If it raises, the block rolls back. There is no order then, and no message either.
            _take_from_stock(order)
    except OutOfStock:
        return JsonResponse({"error": "out of stock"}, status=409)
    return JsonResponse({"order": order.pk}, status=201)


@csrf_exempt
@require_POST
def cancel_order(request: HttpRequest, pk: int) -> JsonResponse:
    """Cancel an order. Its row is locked while we look, so two clicks are one cancellation."""
    with transaction.atomic():
        orders = Order.objects.select_for_update().exclude(status=Order.Status.CANCELLED)
        order = get_object_or_404(orders, pk=pk, email=str(_sent(request).get("email")))
        order.status = Order.Status.CANCELLED
        order.save(update_fields=("status",))
        broadcast("shop.orders.cancelled", _facts(order))
        Product.objects.filter(pk=order.product_id).update(stock=F("stock") + order.quantity)
    return JsonResponse({"order": order.pk})


def _facts(order: Order) -> dict[str, int]:
    """The payload: ids, and facts that never change. Handlers look up the rest when they run."""
    return {"order_id": order.pk, "product_id": order.product_id, "quantity": order.quantity}


def _take_from_stock(order: Order) -> None:
    enough = Product.objects.filter(pk=order.product_id, stock__gte=order.quantity)
    if not enough.update(stock=F("stock") - order.quantity):
        raise OutOfStock


def _sent(request: HttpRequest) -> dict[str, Any]:
    """The JSON object in the body; nothing if there is none, and the form will say what misses."""
    try:
        body = json.loads(request.body)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}
