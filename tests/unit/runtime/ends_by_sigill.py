"""A preload that dies of SIGILL, as by an unsupported instruction."""

import os
import signal

print("about to compute", flush=True)
os.kill(os.getpid(), signal.SIGILL)
