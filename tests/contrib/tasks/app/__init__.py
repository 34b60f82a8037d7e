"""An app whose tasks a worker discovers by itself."""
