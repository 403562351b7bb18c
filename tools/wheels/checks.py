"""What: holds a wheel to what its name promises: any CPython, no PyTorch, the glibc of its tag.
Why: a wheel that pip accepts and that then does not start is worse than one that pip refuses.
Never: builds or changes a wheel.

usage: python -m tools.wheels.checks WHEEL      exit 1 and a line for each broken promise
"""

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import kernel_abi_check

from tools.wheels import floor, inside

# What manylinux_2_28 and Hugging Face's kernels allow beside glibc's version itself.
NEWEST = {"GLIBCXX": "3.4.24", "CXXABI": "1.3.11", "GCC": "7.0.0"}
FLOOR = (2, 28)
# Of a wheel with CUDA lanes: machine code for Ampere and Hopper, and what later chips compile.
DEVICE_CODE = {"sm_80", "sm_90a", "compute_80"}
FOREIGN = ("python", "torch", "cuda", "cublas", "nccl")


def later(one: str, other: str) -> bool:
    return tuple(map(int, one.split("."))) > tuple(map(int, other.split(".")))


def library_faults(library: Path, folder: Path, glibc: str) -> list[str]:
    faults, of = [], inside.dynamic(library)
    symbols = inside.said("nm", "-D", "--undefined-only", str(library))
    faults += [f"needs CPython's {s}" for s in symbols.split() if s.startswith(("Py", "_Py"))]
    faults += [f"is linked with {n}" for n in of["needed"] for word in FOREIGN if word in n]
    for entry in filter(None, of["path"].split(":")):
        there = (library.parent / entry.replace("$ORIGIN", ".")).resolve()
        if not entry.startswith("$ORIGIN") or not there.is_relative_to(folder.resolve()):
            faults.append(f"searches libraries outside the wheel: {entry}")
    for name, newest in (NEWEST | {"GLIBC": glibc}).items():
        if name in of["newest"] and later(of["newest"][name], newest):
            faults.append(f"needs {name}_{of['newest'][name]}; {newest} is the newest allowed")
    if glibc == ".".join(map(str, FLOOR)):
        file = kernel_abi_check.ObjectFile(library)
        faults += [str(fault) for fault in file.check_manylinux("manylinux_2_28")]
    if re.search(rb"/src/(core|device|ops)/", library.read_bytes()):
        faults.append("names the folders that it was built in")
    # Until glibc 2.30 such a name is an error where the library is loaded.
    moved = floor.misplaced(library, tuple(map(int, glibc.split("."))))
    faults += [f"seeks {name} in libc, where it was not yet" for name in moved]
    if of["device_code_bytes"]:
        lacking = DEVICE_CODE - set(inside.device_code(library))
        faults += [f"has no device code for {name}" for name in sorted(lacking)]
    return [f"{library.name}: {fault}" for fault in faults]


def faults(wheel: Path) -> list[str]:
    tag = re.search(r"-py3-none-manylinux_(\d+)_(\d+)_x86_64\.whl$", wheel.name)
    if not tag:
        return [f"{wheel.name}: its tag is not py3-none-manylinux_X_Y_x86_64"]
    glibc, found = ".".join(tag.groups()), []
    if tuple(map(int, tag.groups())) > FLOOR:
        print(f"{wheel.name}: needs glibc {glibc}", file=sys.stderr)
        glibc_only = {"GLIBCXX": "99", "CXXABI": "99", "GCC": "99"}
        NEWEST.update(glibc_only)  # of a system as new as that
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        zipfile.ZipFile(wheel).extractall(folder)
        for library in inside.libraries(folder):
            found += library_faults(library, folder, glibc)
    if wheel.stat().st_size > inside.LIMIT:
        found.append(f"{wheel.stat().st_size} bytes: more than {inside.LIMIT}")
    # W009, W010: auditwheel's own place for what a wheel carries, talea.libs, is beside the package.
    contents = subprocess.run(["check-wheel-contents", "--ignore", "W009,W010", str(wheel)],
                              capture_output=True, text=True)  # fmt: skip
    found += [] if contents.returncode == 0 else [contents.stdout.strip()]
    shown = inside.said("auditwheel", "show", str(wheel))
    said = re.search(r'platform tag:\s+"manylinux_(\d+)_(\d+)_x86_64"', shown)
    if not said or tuple(map(int, said.groups())) > tuple(map(int, tag.groups())):
        found.append(f"auditwheel does not see its tag in it: {shown}")
    return found


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print(__doc__.split("\n\n")[1], file=sys.stderr)
        return 2
    found = faults(Path(argv[0]))
    print("\n".join(found) or f"{Path(argv[0]).name}: keeps what its name promises")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
