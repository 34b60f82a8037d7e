"""`leash.py PROGRAM ARGUMENTS...`: run a program for as long as stdin stays open.

The demo holds the other end of that pipe. It ends a program by closing it; and however the demo
itself ends, even by SIGKILL, the kernel closes it too. A process of its own, since a thread in the
program would be in the way of its forks.
"""

import os
import signal
import subprocess
import sys
import threading
import time

GRACE = 10  # seconds from the asking to the forcing; a worker drains meanwhile


def follow(program: subprocess.Popen[bytes]) -> None:
    """Wait until the other end is closed, then end the program and all that it started."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    program.terminate()
    time.sleep(GRACE)
    # We lead a group of our own (see processes.py); nobody else's is ever touched.
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    running = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    threading.Thread(target=follow, args=(running,), daemon=True).start()
    sys.exit(running.wait())
