"""Guests: integrations of django_mq with other packages, each behind an extra of its own."""
