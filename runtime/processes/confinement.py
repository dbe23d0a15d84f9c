"""Confines a process to computing, for untrusted code in a forked child of its own.

Afterwards the process and what it starts cannot open a file for writing, read one outside the given directories, make
a socket or a process, run a program, signal or trace anyone, or raise its limits: Landlock (landlock(7)) restricts
files; a seccomp allowlist of system calls (seccomp(2), through libseccomp) restricts everything else. Both need no
privileges and cannot be undone. The process can read its own memory, so it must hold no secret when it is forked.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from runtime.processes.kernel import last_error, libc

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # system calls of Landlock, equal on every architecture
_VERSION = 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # Landlock ABI version -> number of file rights
_PR_SET_NO_NEW_PRIVS, _PR_SET_DUMPABLE = 38, 4
_CAPABILITY_VERSION = 0x20080522

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_EQ, _LESS, _MASKED = 4, 2, 7  # libseccomp's comparison operators
_CLONE_THREAD = 0x10000
_MADV_HWPOISON = 100
_MORE_THREADS = 64
# System calls that an interpreter and numpy need to compute, with threads. Left out: sockets, execve, fork, kill,
# ptrace, mount, keyctl, bpf, io_uring, memfd_create (memory that no limit counts), shmget, ioctl.
_CALLS = (
    "read readv pread64 write writev lseek close close_range dup dup2 dup3 pipe pipe2 poll ppoll select pselect6 "
    "openat open stat lstat fstat newfstatat statx access faccessat faccessat2 readlink readlinkat getcwd getdents "
    "getdents64 mmap munmap mremap mprotect brk futex futex_waitv sched_yield sched_getaffinity getcpu rseq "
    "set_robust_list get_robust_list set_tid_address gettid getpid getppid getuid geteuid getgid getegid getrandom "
    "rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack restart_syscall clock_gettime clock_getres clock_nanosleep "
    "nanosleep gettimeofday time times getrusage sysinfo uname getrlimit arch_prctl exit exit_group membarrier"
).split()


class _Compared(ctypes.Structure):
    _fields_ = [
        ("argument", ctypes.c_uint),
        ("operation", ctypes.c_int),
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
    ]


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("directory", ctypes.c_int32)]


@cache
def missing() -> str:
    """What this machine lacks to confine a process, in words; empty if nothing."""
    if _landlock_abi() < 1:
        return "the kernel offers no Landlock (Linux 5.13 or newer, built with CONFIG_SECURITY_LANDLOCK and enabled)"
    if _seccomp() is None:
        return "the library libseccomp.so.2 is not installed (Debian's package libseccomp2)"
    return ""


def confine(readable: Iterable[Path], memory_bytes: int, cpu_s: int) -> None:
    """Confine this process, which should have one thread, permanently.

    readable: directories whose files it may still read. memory_bytes: in addition to its current memory. Raises
    OSError; the caller must then not run the untrusted code.
    """
    if lack := missing():
        raise OSError(errno.ENOSYS, lack)
    _limit(memory_bytes, cpu_s)
    # The second also stops core dumps, and keeps this user's other processes from reading its memory in /proc.
    for option, value in ((_PR_SET_NO_NEW_PRIVS, 1), (_PR_SET_DUMPABLE, 0)):
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise last_error("prctl")
    _drop_capabilities()
    _confine_files(readable)
    _confine_calls()


def _limit(memory_bytes: int, cpu_s: int) -> None:
    threads = int(Path("/proc/loadavg").read_text().rpartition("/")[2].split()[0])  # the threads of all users
    most_threads = resource.getrlimit(resource.RLIMIT_NPROC)[1] % (1 << 63)  # RLIM_INFINITY is -1: no limit
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for limit, value in (
        (resource.RLIMIT_AS, has + memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        # 2 GiB hold more small thread stacks than the machine has thread ids. (The limit does not bind root.)
        (resource.RLIMIT_NPROC, min(threads + _MORE_THREADS, most_threads)),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        resource.setrlimit(limit, (value, value))


def _drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    if libc.capset(header, (ctypes.c_uint32 * 6)()) != 0:
        raise last_error("capset")


def _landlock_abi() -> int:
    return int(libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION)))


def _confine_files(readable: Iterable[Path]) -> None:
    abi = _landlock_abi()
    rules = _Ruleset(
        (1 << _FILE_RIGHTS.get(abi, max(_FILE_RIGHTS.values()))) - 1,
        0b11 if abi >= 4 else 0,  # binding and connecting of TCP sockets
        0b11 if abi >= 6 else 0,  # abstract sockets and signals of other processes
    )
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    ruleset = libc.syscall(_CREATE_RULESET, ctypes.byref(rules), ctypes.c_size_t(size), ctypes.c_uint(0))
    if ruleset < 0:
        raise last_error("landlock_create_ruleset")
    for directory in readable:
        try:
            opened = os.open(directory, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        beneath = _Beneath(_READ_FILE | (_READ_DIR if directory.is_dir() else 0), opened)
        if libc.syscall(_ADD_RULE, ruleset, 1, ctypes.byref(beneath), ctypes.c_uint(0)) != 0:
            raise last_error(f"landlock_add_rule({directory})")
        os.close(opened)
    if libc.syscall(_RESTRICT_SELF, ruleset, ctypes.c_uint(0)) != 0:
        raise last_error("landlock_restrict_self")
    os.close(ruleset)


@cache
def _seccomp() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return None
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_init.argtypes = (ctypes.c_uint32,)
    rule = (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.POINTER(_Compared))
    library.seccomp_rule_add_array.argtypes = rule
    library.seccomp_load.argtypes = (ctypes.c_void_p,)
    return library


def prepare() -> None:
    """Build the seccomp filter once, for every `confine` in a fork of this process: its hundred rules take 2 ms of CPU,
    as long as the confined code may run."""
    if not missing():
        _allowed_calls()


def _confine_calls() -> None:
    library = _seccomp()
    assert library is not None
    if (failed := library.seccomp_load(_allowed_calls())) != 0:
        raise OSError(-failed, f"seccomp_load: {os.strerror(-failed)}")


@cache
def _allowed_calls() -> int:
    """Build libseccomp's filter in this process's memory. Raises OSError."""
    library = _seccomp()
    assert library is not None
    rules = library.seccomp_init(_ERRNO | errno.EPERM)
    if not rules:
        raise OSError(errno.ENOMEM, "seccomp_init")

    def allow(name: str, *conditions: _Compared, action: int = _ALLOW) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:
            return  # no such call on this architecture
        comparisons = (_Compared * len(conditions))(*conditions)
        if (failed := library.seccomp_rule_add_array(rules, action, number, len(conditions), comparisons)) != 0:
            raise OSError(-failed, f"seccomp_rule_add({name}): {os.strerror(-failed)}")

    for name in _CALLS:
        allow(name)
    allow("clone", _Compared(0, _MASKED, _CLONE_THREAD, _CLONE_THREAD))
    allow("clone3", action=_ERRNO | errno.ENOSYS)  # seccomp cannot check flags in memory; libc falls back to clone
    allow("madvise", _Compared(2, _LESS, _MADV_HWPOISON))
    allow("prlimit64", _Compared(0, _EQ, 0), _Compared(2, _EQ, 0))  # only read its own limits
    # No other command: F_SETOWN and F_SETSIG could signal other processes.
    for command in (1, 2, 3, 1030):  # F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC
        allow("fcntl", _Compared(1, _EQ, command))
    return int(rules)
