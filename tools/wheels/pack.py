"""What: takes a wheel apart and writes it again: bound to an older glibc, named for its lanes.
Why: the same sources must give the same bytes, and a file name must say which wheel it is.
Never: keeps a time, an owner or an order of the machine that it ran on.

usage: python -m tools.wheels.pack lower FLOOR WHEEL LIBRARIES   binds the wheel's libraries, and those it will
           carry (copies into the folder LIBRARIES, where auditwheel then finds them)
       python -m tools.wheels.pack label LABEL WHEEL             VERSION becomes VERSION+LABEL; licences and
           the list of what is inside (tools/wheels/inside.py) are added; prints the new path
"""

import base64
import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from tools.wheels import floor, inside

ROOT = Path(__file__).resolve().parents[2]


def moment() -> tuple[int, ...]:
    """The time that every file gets: SOURCE_DATE_EPOCH, which tools/wheel sets to that of the commit."""
    return time.gmtime(max(int(os.environ["SOURCE_DATE_EPOCH"]), 315532800))[:6]


def record(folder: Path) -> str:
    """The text of RECORD: each file with its digest and size."""
    lines = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "RECORD":
            data = path.read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{path.relative_to(folder)},sha256={digest},{len(data)}\n")
    own = next(folder.glob("*.dist-info")).name
    return "".join(lines) + f"{own}/RECORD,,\n"


@contextlib.contextmanager
def opened(wheel: Path, target: Path | None = None):
    """The wheel's files in a folder; what is there at the end is the wheel at `target` (else the same)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        zipfile.ZipFile(wheel).extractall(folder)
        yield folder
        info = next(folder.glob("*.dist-info"))
        (info / "RECORD").write_text(record(folder))
        wheel.unlink()
        with zipfile.ZipFile(target or wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
            for path in sorted(p for p in folder.rglob("*") if p.is_file()):
                entry = zipfile.ZipInfo(str(path.relative_to(folder)), moment())
                entry.compress_type = zipfile.ZIP_DEFLATED
                library = ".so" in path.suffixes
                entry.external_attr = (0o100755 if library else 0o100644) << 16
                entry.create_system = 3
                out.writestr(entry, path.read_bytes())


def lower(version: str, wheel: Path, libraries: Path) -> None:
    libraries.mkdir(parents=True, exist_ok=True)
    wanted = floor.number("GLIBC_" + version)
    with opened(wheel) as folder:
        for library in sorted(folder.rglob("*.so*")):
            for carried in inside.carried(library):
                copy = libraries / carried.name
                shutil.copyfile(carried.resolve(), copy)
                copy.chmod(0o755)
                floor.lower(copy, wanted)
            # The linker's own table repeats the names with the versions that it chose; nothing reads it.
            subprocess.run(["strip", "--strip-unneeded", str(library)], check=True)
            floor.lower(library, wanted)


def label(word: str, wheel: Path) -> Path:
    name, version, rest = wheel.name.split("-", 2)
    named = f"{version}+{word}"
    target = wheel.with_name(f"{name}-{named}-{rest}")
    with opened(wheel, target) as folder:
        old = folder / f"{name}-{version}.dist-info"
        info = old.rename(folder / f"{name}-{named}.dist-info")
        metadata = info / "METADATA"
        text = re.sub(r"^Version: .*$", f"Version: {named}", metadata.read_text(), flags=re.M)
        metadata.write_text(text)
        shutil.rmtree(info / "sboms", ignore_errors=True)  # auditwheel's, which knows less
        licences = info / "licenses"
        licences.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / "LICENSE", licences / "LICENSE")
        texts = {}  # packages of one source share a text
        for package in inside.packages(folder):
            found = Path(f"/usr/share/doc/{package}/copyright")
            if found.is_file():
                texts.setdefault(found.read_bytes(), package)
        for text, package in texts.items():
            (licences / f"{package}.txt").write_bytes(text)
        (info / "sboms").mkdir()
        (info / "sboms/talea.cdx.json").write_text(inside.bill(folder, name, named))
    return target


def main(argv: list[str]) -> int:
    try:
        if len(argv) == 4 and argv[0] == "lower":
            lower(argv[1], Path(argv[2]), Path(argv[3]))
        elif len(argv) == 3 and argv[0] == "label":
            print(label(argv[1], Path(argv[2])))
        else:
            print(__doc__.split("\n\n")[1], file=sys.stderr)
            return 2
    except (floor.FloorError, subprocess.CalledProcessError) as error:
        print(f"tools/wheels/pack.py: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
