"""A function of many items in several processes: results in the order of the items, in bounded memory.

Each process has a pipe of its own, whose other end is with a thread here that gives it one item at a time. So a process
that is killed, at whatever moment, is the end of its pipe and thereby an error; and so is this process to the others.
"""

import collections
import contextlib
import functools
import multiprocessing
import queue
import signal
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker

from config import ConfigError

AHEAD = 3  # items under way for each process: at work, waiting, and done but not yet next in order


@contextlib.contextmanager
def pool(workers):
    """Start that many processes, and end them with the block. One worker is this process itself.

    Give spread(make, *arguments), which returns a function from items to an iterator over what make(*arguments), itself
    a function, returns for each. It is made once in every process; `make` has to lie in a module.
    """
    if workers == 1:
        yield lambda make, *arguments: functools.partial(map, make(*arguments))
        return
    spawn = multiprocessing.get_context("spawn")  # a fresh Python each: the one way that every system has
    processes, connections, threads = [], [], ThreadPoolExecutor(workers)

    def spread(make, *arguments):
        idle = queue.SimpleQueue()
        for connection in connections:
            idle.put(connection)
            talk(connection.send, (make, arguments))
        return functools.partial(in_order, functools.partial(threads.submit, ask, idle), AHEAD * workers)

    try:
        with interrupts_held():
            for _ in range(workers):
                ours, theirs = spawn.Pipe()
                process = spawn.Process(target=work, args=(theirs,), daemon=True)
                talk(process.start)
                theirs.close()  # a copy left open here would hide the end of the process
                processes.append(process)
                connections.append(ours)
        yield spread
    finally:
        for process in processes:
            process.terminate()
        threads.shutdown(cancel_futures=True)
        for process in processes:
            process.join()


def in_order(submit, ahead, items):
    """Yield the results of the items in their order, while at most `ahead` of them are under way."""
    waiting = collections.deque()
    for item in items:
        waiting.append(submit(item))
        if len(waiting) == ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def ask(idle, item):
    """Return what an idle process makes of an item."""
    connection = idle.get()
    try:
        talk(connection.send, item)
        result = talk(connection.recv)
    finally:
        idle.put(connection)
    if isinstance(result, Exception):
        raise result
    return result


def talk(call, *arguments):
    """Start, send or receive; the end of the pipe is the end of the process."""
    try:
        return call(*arguments)
    except (EOFError, OSError):
        raise ConfigError("a worker process died, killed or for want of memory; try fewer: --workers=1") from None


def work(connection):
    """Answer what comes through the connection until it ends: the whole life of a process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for systems where it cannot be held
    with contextlib.suppress(EOFError, OSError):
        make, arguments = connection.recv()
        function = make(*arguments)
        while True:
            item = connection.recv()
            try:
                result = function(item)
            except Exception as error:
                result = error
            connection.send(result)


@contextlib.contextmanager
def interrupts_held():
    """Put Ctrl-C off until the end of the block, and for ever in the processes started there: this one answers it."""
    held = []
    handler = signal.signal(signal.SIGINT, lambda *_: held.append(True))
    mask = None
    if hasattr(signal, "pthread_sigmask"):  # all but Windows; started processes inherit the mask
        resource_tracker.ensure_running()  # a process of multiprocessing's own, whose start would lift the mask
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if held:
        raise KeyboardInterrupt
