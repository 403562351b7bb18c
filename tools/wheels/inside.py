"""What: what a wheel holds: libraries it carries, code linked or compiled in, sizes, versions asked for.
Why: whoever installs a binary may ask what is in it and on which systems it starts, and get one file.
Never: guesses a version: it is the package manager's or the compiler's own word.

usage: python -m tools.wheels.inside WHEEL [--receipt FILE]     prints what the wheel is, as JSON, or writes it
           to FILE, and the bill of materials beside the wheel
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from pathlib import Path

from elftools.elf.elffile import ELFFile

# Carried along, where a library asks for it: soname, and the Debian package that has it.
CARRIED = {"libgomp.so.1": "libgomp1", "libhwy.so.1": "libhwy1"}
# Compiled or linked into libtalea.so: Debian packages.
COMPILED = ("libfmt-dev", "libhwy-dev", "nlohmann-json3-dev", "libvalijson-dev")
LIMIT = 20 << 20  # of a wheel with CUDA lanes


def said(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def version_of(package: str) -> str:
    return said("dpkg-query", "-W", "-f=${Version}", package)


def dynamic(library: Path) -> dict:
    """What the dynamic section asks for."""
    with library.open("rb") as file:
        elf = ELFFile(file)
        needed, path = [], ""
        for tag in elf.get_section_by_name(".dynamic").iter_tags():
            if tag.entry.d_tag == "DT_NEEDED":
                needed.append(tag.needed)
            elif tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH"):
                path = getattr(tag, "runpath", "") or getattr(tag, "rpath", "")
        newest: dict[str, tuple] = {}
        versions = elf.get_section_by_name(".gnu.version_r")
        for _, auxiliaries in versions.iter_versions() if versions else ():
            for auxiliary in auxiliaries:
                head, _, tail = auxiliary.name.partition("_")
                if re.fullmatch(r"[0-9.]+", tail):
                    found = tuple(map(int, tail.split(".")))
                    newest[head] = max(newest.get(head, ()), found)
        fatbin = elf.get_section_by_name(".nv_fatbin")
        return {
            "needed": sorted(needed), "path": path, "device_code_bytes": fatbin["sh_size"] if fatbin else 0,
            "newest": {head: ".".join(map(str, found)) for head, found in sorted(newest.items())},
        }  # fmt: skip


def carried(library: Path) -> list[Path]:
    """The libraries of this machine that the wheel has to carry for `library`."""
    return [Path(said("cc", f"-print-file-name={name}")) for name in dynamic(library)["needed"]
            if name in CARRIED]  # fmt: skip


def libraries(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if ".so" in p.suffixes and p.is_file())


def packages(folder: Path) -> list[str]:
    """Debian packages of which some code is in the wheel: carried, or linked in."""
    names = [path.name for path in libraries(folder)]
    there = [package for soname, package in CARRIED.items()
             if any(name.startswith(soname.split(".")[0]) for name in names)]  # fmt: skip
    # The compiler's own: libstdc++ is linked in statically.
    compiler = said("cc", "-dumpversion").split(".")[0]
    return [*there, *(p for p in (*COMPILED, f"libstdc++-{compiler}-dev") if version_of(p))]


def components(folder: Path) -> list[dict]:
    found = [{"type": "library", "name": package, "version": version_of(package),
              "purl": f"pkg:deb/debian/{package}@{version_of(package)}"}
             for package in packages(folder)]  # fmt: skip
    if any(dynamic(path)["device_code_bytes"] for path in libraries(folder)):
        release = re.search(r"release [0-9.]+, V([0-9.]+)", said("nvcc", "--version"))
        found.append({"type": "library", "name": "cuda-cudart-static",
                      "version": release.group(1) if release else "unknown"})  # fmt: skip
    return found


def bill(folder: Path, name: str, version: str) -> str:
    """The software bill of materials, CycloneDX 1.6; its time is that of the commit."""
    moment = time.gmtime(int(os.environ["SOURCE_DATE_EPOCH"]))
    document = {
        "bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", moment),
            "component": {"type": "library", "name": name, "version": version,
                          "purl": f"pkg:pypi/{name}@{version}",
                          "licenses": [{"license": {"id": "Apache-2.0"}}]},
        },
        "components": components(folder),
    }  # fmt: skip
    return json.dumps(document, indent=1) + "\n"


def device_code(library: Path) -> list[str]:
    """What the device code is for: sm_80, sm_90a, and compute_80 of PTX, which later chips compile."""
    carried = Path(sysconfig.get_path("purelib"), "nvidia/cu13/bin/cuobjdump")  # of tools/wheel.txt
    cuobjdump = shutil.which("cuobjdump") or str(carried)
    found = re.findall(r"\.(sm_[0-9]+a?)\.cubin", said(cuobjdump, "--list-elf", str(library)))
    later = re.findall(r"\.sm_([0-9]+a?)\.ptx", said(cuobjdump, "--list-ptx", str(library)))
    return sorted(set(found) | {f"compute_{name}" for name in later})


def described(wheel: Path) -> dict:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
            files = {i.filename: i.file_size for i in archive.infolist()}
        found = []
        for library in libraries(folder):
            of = dynamic(library)
            if of["device_code_bytes"]:
                of["device_code"] = device_code(library)
            found.append({"file": str(library.relative_to(folder)), **of})
        made_of = [f"{c['name']} {c['version']}" for c in components(folder)]
    return {
        "wheel": wheel.name, "bytes": wheel.stat().st_size,
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "libraries": found, "made_of": made_of, "files": dict(sorted(files.items())),
    }  # fmt: skip


def main(argv: list[str]) -> int:
    if len(argv) not in (1, 3) or (len(argv) == 3 and argv[1] != "--receipt"):
        print(__doc__.split("\n\n")[1], file=sys.stderr)
        return 2
    wheel = Path(argv[0])
    text = json.dumps(described(wheel), indent=1) + "\n"
    if len(argv) == 3:
        Path(argv[2]).write_text(text)
        with zipfile.ZipFile(wheel) as archive:
            bills = [n for n in archive.namelist() if n.endswith("/sboms/talea.cdx.json")]
            wheel.with_suffix(".cdx.json").write_bytes(archive.read(bills[0]))
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
