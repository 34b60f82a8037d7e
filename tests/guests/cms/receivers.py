"""The guide's receivers: for new users, and for published pages."""

from tests.guests.recipes import run_recipe

run_recipe("Wagtail", globals())
