"""Ctrl-C and SIGTERM ask a run to stop after the current step; a second one stops it at once."""

import signal


class StopSignals:
    """From its making until `restore`, `requested` says whether a stop was asked for."""

    def __init__(self):
        self.requested = False
        self.earlier = {s: signal.signal(s, self.request) for s in (signal.SIGINT, signal.SIGTERM)}

    def request(self, number, frame):
        self.requested = True
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def restore(self):
        for number, handler in self.earlier.items():
            signal.signal(number, handler)
