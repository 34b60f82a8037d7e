"""Other packages, unmodified, in small projects: Wagtail, django-oscar, django-debug-toolbar.

`python -m tests.guests` installs them into a separate environment and runs all their tests. Tests
of a guest that is not installed skip.

Each guest is a project with `settings`, supporting modules, and `scenarios`, which Django's test
runner runs in a separate process. Recipes are read from the documentation.
"""
