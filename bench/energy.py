"""What: the power that a device draws over a run, from the counter of its energy.
Why: the counter moves some ten times a second: read at the two ends of half a second, it is off by a tenth.
Never: measures where the counter stands still, or disturbs what is timed: a read takes no lock of a stream.
"""

import threading
import time

READ_EVERY_S = 0.005


class Power:
    """with Power(joules) as power: run(); power.watts()

    The mean between the first and the last move of joules() that the run saw; over all of the run,
    where it saw fewer than three.
    """

    def __init__(self, joules, clock=time.perf_counter):
        self.joules, self.clock = joules, clock
        self.reads, self.over = [], threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self):
        self.read()
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()
        self.last = (self.clock(), self.joules())

    def _watch(self):
        while not self.over.wait(READ_EVERY_S):
            self.read()

    def read(self):
        now, joules = self.clock(), self.joules()
        if not self.reads or joules != self.reads[-1][1]:
            self.reads.append((now, joules))

    def watts(self):
        moves = self.reads[1:]  # the first read fell between two moves
        begin, end = (moves[0], moves[-1]) if len(moves) >= 3 else (self.reads[0], self.last)
        return (end[1] - begin[1]) / (end[0] - begin[0])
