"""The shop's side of the admin."""

from django.contrib import admin

from .models import Export, Invoice, Order, Product, Report, Statistic


@admin.register(Product)
class ProductAdmin(admin.ModelAdmin):
    list_display = ("name", "price", "stock")


@admin.register(Order)
class OrderAdmin(admin.ModelAdmin):
    list_display = ("id", "product", "quantity", "price", "email", "status", "placed_at", "run")
    list_filter = ("status", "run")
    list_select_related = ("product",)
    readonly_fields = ("placed_at",)


@admin.register(Invoice)
class InvoiceAdmin(admin.ModelAdmin):
    list_display = ("number", "order", "total", "handled_at")
    readonly_fields = ("handled_at",)


@admin.register(Report)
class ReportAdmin(admin.ModelAdmin):
    list_display = ("scheduled_for", "orders", "turnover", "written_at")
    readonly_fields = ("written_at",)


@admin.register(Export)
class ExportAdmin(admin.ModelAdmin):
    list_display = ("id", "parts", "done", "cancelled")


@admin.register(Statistic)
class StatisticAdmin(admin.ModelAdmin):
    list_display = ("day", "product", "sold", "cancelled")
    list_select_related = ("product",)
