"""Calls a function in a process of its own, which is forked from this one."""

import os
import pickle
import signal
import sys

SECONDS = 60  # after which it hangs: by the clock, on a machine that has other work to do


def apart(function, *arguments, leave=os._exit, processor_seconds=SECONDS):
    """Return what the function returns, or None where it does not, and the exit status.

    `leave` ends the process, which must not take Python down. It is killed when all its threads
    together have taken so many seconds of the processors.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())  # kernels may print
            signal.alarm(SECONDS)
            signal.setitimer(signal.ITIMER_PROF, processor_seconds)
            result = function(*arguments)
            with open(writer, "wb") as pipe:
                pickle.dump(result, pipe)
            status = 0
        finally:
            leave(status)
    os.close(writer)
    with open(reader, "rb") as pipe:
        sent = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return pickle.loads(sent) if sent else None, status
