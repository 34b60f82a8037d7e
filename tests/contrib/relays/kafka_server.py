"""A Kafka broker for tests: the one that librdkafka has for its own tests, in this process.

`python -m tests.contrib.relays.kafka_server PORT_FILE` writes its address and runs until it is
killed.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from pathlib import Path

import confluent_kafka

PRODUCER = 0


def start() -> str:
    """Start the broker; return its address. It ends with the process."""
    directory = Path(confluent_kafka.__file__).parent.with_name("confluent_kafka.libs")
    library = ctypes.CDLL(str(next(directory.glob("librdkafka*.so*"))))
    library.rd_kafka_conf_new.restype = ctypes.c_void_p
    library.rd_kafka_new.restype = ctypes.c_void_p
    library.rd_kafka_new.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
    ]
    library.rd_kafka_mock_cluster_new.restype = ctypes.c_void_p
    library.rd_kafka_mock_cluster_new.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
    library.rd_kafka_mock_cluster_bootstraps.argtypes = [ctypes.c_void_p]
    error = ctypes.create_string_buffer(512)
    client = library.rd_kafka_new(PRODUCER, library.rd_kafka_conf_new(), error, len(error))
    cluster = library.rd_kafka_mock_cluster_new(client, 1)
    return str(library.rd_kafka_mock_cluster_bootstraps(cluster).decode())


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(start())
    signal.pause()
