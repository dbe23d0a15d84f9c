"""Loads C library functions for which Python has no binding, with their argument types."""

from __future__ import annotations

import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def last_error(what: str) -> OSError:
    """Return the error of the call that has just failed; `what` says what failed."""
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")
