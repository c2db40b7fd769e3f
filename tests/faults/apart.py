"""Calls a function in a process of its own, which is forked from this one."""

import ctypes
import os
import pickle
import signal
import sys

NOWHERE = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
SECONDS = 60  # after which it hangs: by the clock, on a machine that has other work to do

# Forks, and tells nobody: neither Python nor any library hears of it. With the GIL, as os.fork;
# None where the C library has no such function.
copy_process = getattr(ctypes.PyDLL(None), "_Fork", None)


def apart(function, *arguments, fork=os.fork, leave=os._exit, processor_seconds=SECONDS):
    """Return what the function returns, or None where it does not, and the exit status.

    `fork` makes the process, and `leave` ends it, which must not take Python down. It is killed
    when all its threads together have taken so many seconds of the processors.
    """
    reader, writer = os.pipe()
    child = fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            os.dup2(NOWHERE, sys.__stdout__.fileno())  # kernels may print
            signal.alarm(SECONDS)
            signal.setitimer(signal.ITIMER_PROF, processor_seconds)
            sent = pickle.dumps(function(*arguments), pickle.HIGHEST_PROTOCOL)
            while sent:
                sent = sent[os.write(writer, sent) :]
            status = 0
        finally:
            leave(status)
    os.close(writer)
    pieces = []
    while piece := os.read(reader, 1 << 16):
        pieces.append(piece)
    os.close(reader)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return pickle.loads(b"".join(pieces)) if pieces else None, status
