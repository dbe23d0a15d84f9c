"""Entry functions for children of a warm parent; the import of this module is the preload."""

import concurrent.futures
import os
import resource
import sys
import threading
import time

from runtime.devices import kind, kinds

PRELOADED_IN = os.getpid()
LET_GO: list[int] = []  # pids of processes that ran `before_fork`
ASKED: list[int] = []  # pids of processes that called `ask_for_instructions`
ASKED_BEFORE_ENTRY: list[int] = []
if "warm_parent" in sys.argv[0]:  # pytest imports this module too
    kinds.before_fork = lambda: LET_GO.append(os.getpid())
    kind.ask_for_instructions = lambda: ASKED.append(os.getpid())


def echo(lifeline, args):
    ASKED_BEFORE_ENTRY.extend(ASKED)
    stop = threading.Event()
    pool = concurrent.futures.ThreadPoolExecutor(1)

    def fail(message):
        raise ValueError(message)

    lifeline.serve(
        {
            "echo": lambda **kw: {"args": args, "got": kw, "pid": os.getpid(), "preloaded_in": PRELOADED_IN},
            "let_go": lambda: LET_GO,
            "asked": lambda: ASKED_BEFORE_ENTRY,
            "exit": os._exit,
            "end_with": lambda kind: lifeline.fatal(type(kind, (Exception,), {})()),
            "core_bytes": lambda: resource.getrlimit(resource.RLIMIT_CORE),
            "env": lambda name: os.environ.get(name),
            "fail": fail,
            "later": lambda value: pool.submit(lambda: value * 2),
            "emit": lambda n: [lifeline.emit("tick", i=i) for i in range(n)] and None,
            "fork": _fork_sleeper,
            "flood": lambda: pool.submit(lifeline.emit, "flood", text="x" * 2**24) and None,
            "hang": lambda: time.sleep(3600),
            "stop": stop.set,
            "set": lambda: {1, 2},
        }
    )
    stop.wait()
    return 0


def says_and_ends(lifeline, args):
    lifeline.emit("done")


def starting(lifeline, args):
    """Entry that never reaches `serve`, like an engine that loads for a long time."""
    lifeline.emit("forked", grandchild=_fork_sleeper())
    time.sleep(3600)
    return 0


def _fork_sleeper():
    pid = os.fork()
    if pid == 0:
        time.sleep(3600)
        os._exit(0)
    return pid


def crash(lifeline, args):
    raise RuntimeError("boom at start")
