"""What every part of the suite shares."""

import os
import signal
import sys

# Two hundred processes are started, and most images of containers set this: each of them would
# compile the package anew, and each process of pytest all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Whoever runs the tests in the background of a shell has SIGINT ignored, and what they start
# would inherit that: Ctrl-C is one of the things they try.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
