"""Applying a function to many items in several processes, with results in the order of the items, in bounded memory.

Each process is connected by a pipe to a thread of this process, which sends it one item at a time. If a process is
killed, its pipe ends, and this process raises an error. If this process is killed, the pipes end too, and so do the
other processes.
"""

import collections
import contextlib
import functools
import multiprocessing
import queue
import signal
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker

from cli.errors import ConfigError

AHEAD = 3  # items per process: one in work, one waiting, and one that is done before an earlier item


@contextlib.contextmanager
def pool(workers):
    """Start this many processes, and end them at the end of the block. A single worker is this process itself.

    Yield a function spread(make, *arguments). make(*arguments) returns a function f, and is called once in each
    process; `make` has to be defined in a module. spread() returns a function from items to an iterator over f(item).
    """
    if workers == 1:
        yield lambda make, *arguments: functools.partial(map, make(*arguments))
        return
    spawn = multiprocessing.get_context("spawn")  # the start method that every operating system has
    processes, connections, threads = [], [], ThreadPoolExecutor(workers)

    def spread(make, *arguments):
        idle = queue.SimpleQueue()
        for connection in connections:
            idle.put(connection)
            send_or_fail(connection.send, (make, arguments))
        return functools.partial(in_order, functools.partial(threads.submit, ask, idle), AHEAD * workers)

    try:
        with interrupts_delayed():
            for _ in range(workers):
                ours, theirs = spawn.Pipe()
                process = spawn.Process(target=work, args=(theirs,), daemon=True)
                send_or_fail(process.start)
                theirs.close()  # if it stayed open here, the end of the process would go unnoticed
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
    """Yield the results in the order of the items, with at most `ahead` items submitted and not yet yielded."""
    waiting = collections.deque()
    for item in items:
        waiting.append(submit(item))
        if len(waiting) == ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def ask(idle, item):
    """Let an idle process compute the result of an item, and return it."""
    connection = idle.get()
    try:
        send_or_fail(connection.send, item)
        result = send_or_fail(connection.recv)
    finally:
        idle.put(connection)
    if isinstance(result, Exception):
        raise result
    return result


def send_or_fail(call, *arguments):
    """Start a process, send or receive. An ended pipe means that the process has ended."""
    try:
        return call(*arguments)
    except (EOFError, OSError):
        raise ConfigError(
            "a worker process died: it was killed, or memory ran out; try fewer, such as --workers=1"
        ) from None


def work(connection):
    """Run a worker process: receive items from the connection and send their results, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for systems on which the signal cannot be blocked
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
def interrupts_delayed():
    """Delay Ctrl-C until the end of the block. Processes that are started in the block ignore it for ever."""
    delayed = []
    handler = signal.signal(signal.SIGINT, lambda *_: delayed.append(True))
    mask = None
    if hasattr(signal, "pthread_sigmask"):  # not on Windows; started processes inherit the mask
        resource_tracker.ensure_running()  # a process of multiprocessing, whose start in the block would reset the mask
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if delayed:
        raise KeyboardInterrupt
