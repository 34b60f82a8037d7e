"""Django's PostgreSQL engine on top of the private server."""

from typing import Any

from django.db.backends.postgresql import base

from . import server


class DatabaseWrapper(base.DatabaseWrapper):
    """Connects to the server of `DATABASES[alias]["DATA"]`, started when first asked for.

    Nothing starts before somebody needs a connection: `check` and `--help` start no server.
    `psycopg.connect(**connection.get_connection_params())` reaches it too.
    """

    def get_connection_params(self) -> dict[str, Any]:
        """Return Django's parameters, with the running server's address unless HOST has one.

        Raises ImproperlyConfigured if there is no PostgreSQL to start or it does not start.
        """
        address = server.ensure(self.settings_dict["DATA"])
        return {"host": str(address), "port": server.PORT, **super().get_connection_params()}
