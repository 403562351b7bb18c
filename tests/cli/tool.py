# What: the program under test, run from outside, and small tensors in files.
# Why: every command is tried the same way: its exit code, its text, what it left behind.
# Never: needs more than the standard library; tensors are written byte by byte.
# A test's first argument is the program: it is taken off the command line here.
import array
import json
import math
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest

MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe"]
MPIRUN += ["--mca", "btl", "self,vader", "--mca", "btl_vader_single_copy_mechanism", "none"]
TALEA = os.path.abspath(sys.argv.pop(1))


def npy(path, descr, shape, raw):
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {tuple(shape)}, }}"
    header += " " * (-(10 + len(header) + 1) % 64) + "\n"
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + raw
    pathlib.Path(path).write_bytes(data)


def floats(path, shape, values):
    npy(path, "<f4", shape, array.array("f", values).tobytes())


def ids(path, values):
    npy(path, "<i8", (len(values),), array.array("q", values).tobytes())


def safetensors(path):
    raw = pathlib.Path(path).read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        kind = {"F32": "f", "I64": "q"}[entry["dtype"]]
        values = array.array(kind)
        values.frombytes(raw[8 + size + begin : 8 + size + end])
        found[name] = (entry["shape"], list(values))
    return found


class Case(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        # Two tokens, hidden 1: the logits are the weights (0, log 3) and twice that.
        floats(self.at("x.npy"), (2, 1), [1, 2])
        floats(self.at("w.npy"), (2, 1), [0, math.log(3)])
        ids(self.at("y.npy"), [1, 0])

    def at(self, name):
        return os.path.join(self.folder.name, name)

    def talea(self, *arguments, code=0, **more):
        done = subprocess.run(
            [TALEA, *arguments],
            cwd=self.folder.name,
            capture_output=True,
            text=True,
            timeout=120,
            **more,
        )
        self.assertEqual(done.returncode, code, f"{arguments}\n{done.stdout}\n{done.stderr}")
        return done

    def loss(self, *arguments, code=0):
        base = ["loss", "--hidden", "x.npy", "--weight", "w.npy", "--targets", "y.npy"]
        return self.talea(*base, *arguments, code=code)
