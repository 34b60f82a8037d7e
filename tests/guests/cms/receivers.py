"""The receivers of the guide: of new users, and of published pages."""

from tests.guests.recipes import run_recipe

run_recipe("Wagtail", globals())
