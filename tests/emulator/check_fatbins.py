#!/usr/bin/env python3
"""Checks that every fat binary of the objects or programs named holds uncompressed PTX and nothing else."""
import struct, sys
bad = 0
for name in sys.argv[1:]:
    data = open(name, "rb").read()
    at, entries, size = 0, 0, 0
    while (at := data.find(struct.pack("<I", 0xBA55ED50), at)) >= 0:
        version, header, total = struct.unpack_from("<HHQ", data, at + 4)
        e, end = at + header, at + header + total
        at += 4
        if end > len(data) or version > 4:
            continue
        while e < end:
            kind, _, eh, n = struct.unpack_from("<HHIQ", data, e)
            text = data[e + eh:e + eh + n]
            entries, size = entries + 1, size + n
            if kind != 1 or b".version" not in text[:4000]:
                bad += 1
                print(f"{name}: entry of kind {kind}, {n} bytes, not plain PTX")
            e += eh + n
    print(f"{name.split('/')[-1]}: {entries} entries, {size} bytes of PTX")
sys.exit(bad > 0)
