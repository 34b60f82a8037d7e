"""A private PostgreSQL for development: nothing to set up, nothing left running.

`ENGINE = "testproject.embedded"` is Django's PostgreSQL engine, except that the first connection
starts a server and the last process to leave stops it. Its data stays under `DATA`.

| module        | its thought                                                       |
|---------------|-------------------------------------------------------------------|
| `base.py`     | the database engine: asks for the server before it connects       |
| `server.py`   | ensure(): one server for all processes that use a data directory   |
| `users.py`    | who uses the server, so that the last out can stop it             |
| `binaries.py` | where PostgreSQL's programs are                                   |
| `places.py`   | which account runs the server, and which directories it can reach |
"""
