"""What: what scripts here measure a call by: peak memory of this process, medians and quantiles.
Why: two scripts that count differently cannot stand in one table.
Never: knows an operator or a peer.
"""

import ctypes
import gc
import re
import statistics

LIBC = ctypes.CDLL(None)


def status_bytes(field):
    with open("/proc/self/status") as f:
        return int(re.search(rf"{field}:\s+(\d+) kB", f.read()).group(1)) << 10


class Peak:
    """The kernel's high-water mark of resident memory while open, above the level at entry."""

    def __enter__(self):
        gc.collect()
        LIBC.malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")
        self.before = status_bytes("VmRSS")
        return self

    def __exit__(self, *_):
        self.bytes = status_bytes("VmHWM") - self.before


def time_stats(ms):
    """A receipt's `time`: the median and the fifths beside it, between the samples where they fall so."""
    cuts = statistics.quantiles(ms, n=5, method="inclusive") if len(ms) > 1 else [ms[0]] * 4
    return {
        "median_ms": statistics.median(ms),
        "p20_ms": cuts[0],
        "p80_ms": cuts[3],
        "n": len(ms),
    }
