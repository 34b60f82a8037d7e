"""An app whose tasks a worker finds by itself."""
