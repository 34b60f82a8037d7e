"""What every part of the suite shares."""

import signal

# Whoever runs the tests in the background of a shell has SIGINT ignored, and what they start
# would inherit that: Ctrl-C is one of the things they try.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
