"""What: bench/energy.py over a counter that moves every tenth of a second, as a device's does.
Why: joules a step decide milliseconds under a power limit, and the counter's steps hid a tenth of them.
Never: needs a device, or the time that it tells of.

usage: energy_test.py
"""

import sys
import time
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from energy import Power


class Device:
    """700 W, told every `period` seconds."""

    def __init__(self, begin, period=0.1, watts=700):
        self.now, self.period, self.watts = begin, period, watts

    def joules(self):
        return self.watts * self.period * (self.now // self.period)


def measured(device, seconds):
    power = Power(device.joules, lambda: device.now)
    power.thread = type("Nobody", (), {"start": lambda s: None, "join": lambda s: None})()
    with power:
        for _ in range(round(seconds / 0.002)):
            device.now += 0.002
            power.read()
    return power.watts()


class PowerTest(unittest.TestCase):
    def test_the_counter_s_steps_do_not_show(self):
        for begin in (10.0, 10.031, 10.099):
            for seconds in (0.45, 0.5, 0.57):
                with self.subTest(begin=begin, seconds=seconds):
                    self.assertAlmostEqual(measured(Device(begin), seconds) / 700, 1, delta=0.012)

    def test_its_two_ends_alone_are_off_by_a_tenth(self):
        device = Device(10.099)
        begin = device.joules()
        device.now += 0.5 + 0.002
        self.assertGreater((device.joules() - begin) / 0.502 / 700, 1.1)

    def test_a_run_of_few_moves_is_taken_whole(self):
        self.assertAlmostEqual(measured(Device(10.0, period=0.4), 0.8) / 700, 1, delta=0.01)

    def test_a_thread_reads_beside_the_run(self):
        device = Device(10.0)
        with Power(device.joules, lambda: device.now) as power:
            for _ in range(5):
                before = len(power.reads)
                device.now += 0.1
                for _ in range(5000):
                    if len(power.reads) > before:
                        break
                    time.sleep(0.001)
        self.assertAlmostEqual(power.watts() / 700, 1, delta=0.01)


if __name__ == "__main__":
    unittest.main()
