"""A preload whose import does not end."""

import time

time.sleep(3600)
