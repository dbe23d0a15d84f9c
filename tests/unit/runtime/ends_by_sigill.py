"""A preload that uses an instruction which the machine refuses."""

import os
import signal

print("about to compute", flush=True)
os.kill(os.getpid(), signal.SIGILL)
