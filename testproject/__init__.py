"""A small Django project with real handlers, for the demo, the tests and for reading."""
