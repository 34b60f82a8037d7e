"""The version of the package, as in pyproject.toml; a test compares the two."""

VERSION = "0.1.0"
