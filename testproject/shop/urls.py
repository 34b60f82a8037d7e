"""The shop's URLs."""

from django.urls import path

from . import views

app_name = "shop"
urlpatterns = [
    path("", views.catalogue, name="catalogue"),
    path("orders/", views.place_order, name="place-order"),
    path("orders/<int:pk>/cancel/", views.cancel_order, name="cancel-order"),
]
