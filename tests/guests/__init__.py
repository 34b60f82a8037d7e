"""Other packages as they are, in small projects: Wagtail, django-oscar, django-debug-toolbar.

`python -m tests.guests` installs them into an environment of their own and runs all of it. Where
one is not installed, its tests skip.

Each guest is a project: `settings`, what it needs beside them, and `scenarios`, which Django's own
test runner runs in a process of its own. Recipes are read from the documentation.
"""
