"""The fault suite: real workers, broken at every message they send to the server. See README.md."""
