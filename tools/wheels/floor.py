"""What: binds a shared library to the versions of glibc's functions that an older glibc has, too.
Why: linked on Debian 12, `exp` means exp@GLIBC_2.29 although exp@GLIBC_2.2.5 would do; the newer
glibc still has the older one, so that the choice can be made after linking. What was a function of
libpthread or libdl then loses its version instead: until 2.30 a version was looked for in the one
library that the file names beside it, which is libc today.
Never: changes what a name means: a version is taken only from the glibc of this machine, and a name
that the older glibc lacks is an error.

usage: python -m tools.wheels.floor 2.28 LIBRARY...      (needs pyelftools and patchelf)
"""

import struct
import subprocess
import sys
from pathlib import Path

from elftools.elf.elffile import ELFFile

# Until 2.34 these were libraries of their own; where they still are, they must be loaded.
MOVED = ("libpthread.so.0", "libdl.so.2", "librt.so.1")
# A name without a version finds this one where there is one (glibc's ld.so), else the default.
FIRST, ANY, LIBC = "GLIBC_2.2.5", 1, "libc.so.6"
HEADER, ENTRY = struct.Struct("<HHIII"), struct.Struct("<IHHII")


class FloorError(Exception):
    """A library cannot be bound to the wanted glibc; the text says which name stands against it."""


def number(version: str) -> tuple[int, ...]:
    """(2, 34) of GLIBC_2.34; () of what is no version of glibc."""
    head, _, tail = version.partition("_")
    return tuple(map(int, tail.split("."))) if head == "GLIBC" and tail[:1].isdigit() else ()


def elf_hash(name: str) -> int:
    value = 0
    for byte in name.encode():
        value = (value << 4) + byte
        high = value & 0xF0000000
        value = (value ^ high ^ (high >> 24)) & 0x0FFFFFFF
    return value


def defined(library: str) -> dict[str, list[str]]:
    """Each name that this machine's library defines: the versions it has, oldest first."""
    found = subprocess.run(["cc", f"-print-file-name={library}"], check=True,
                           capture_output=True, text=True).stdout.strip()  # fmt: skip
    names: dict[str, list[str]] = {}
    with open(found, "rb") as file:
        elf = ELFFile(file)
        versions = elf.get_section_by_name(".gnu.version")
        texts = {
            definition["vd_ndx"]: next(iter(auxiliaries)).name
            for definition, auxiliaries in elf.get_section_by_name(".gnu.version_d").iter_versions()
        }
        for i, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
            index = versions.get_symbol(i)["ndx"]
            if symbol["st_shndx"] != "SHN_UNDEF" and isinstance(index, int):
                text = texts.get(index & 0x7FFF, "")
                if number(text):
                    names.setdefault(symbol.name, []).append(text)
    return {name: sorted(set(found), key=number) for name, found in names.items()}


def unversioned(versions: list[str], floor: tuple[int, ...]) -> bool:
    """Whether the name alone finds what it should: the first version of all, or the only default."""
    old = [v for v in versions if number(v) <= floor]
    return old == [FIRST] or FIRST not in old


class Needs:
    """What a library asks of others: the tables of versions, changed in the file's bytes."""

    def __init__(self, path: Path):
        self.path, self.data = path, bytearray(path.read_bytes())
        with path.open("rb") as file:
            elf = ELFFile(file)
            self.part = {
                section.name: (section["sh_offset"], section["sh_size"])
                for section in elf.iter_sections()
            }
            self.symbols = [
                (symbol.name, symbol["st_shndx"] == "SHN_UNDEF")
                for symbol in elf.get_section_by_name(".dynsym").iter_symbols()
            ]
            self.threads_apart = any(
                tag.entry.d_tag == "DT_NEEDED" and tag.needed == MOVED[0]
                for tag in elf.get_section_by_name(".dynamic").iter_tags()
            )
        # [library, offset of its header, [[index, offset of the version's text], ...]]
        self.files: list[list] = []
        at = self.part[".gnu.version_r"][0]
        while True:
            _, count, name, first, step = HEADER.unpack_from(self.data, at)
            entries, here = [], at + first
            for _ in range(count):
                _, _, index, text, onward = ENTRY.unpack_from(self.data, here)
                entries.append([index, text])
                here += onward
            self.files.append([self.text(name), at, entries])
            if not step:
                break
            at += step

    def text(self, offset: int) -> str:
        begin = self.part[".dynstr"][0] + offset
        return self.data[begin : self.data.index(0, begin)].decode()

    def version_of(self, i: int) -> int:
        return struct.unpack_from("<H", self.data, self.part[".gnu.version"][0] + 2 * i)[0]

    def set_version(self, i: int, index: int) -> None:
        struct.pack_into("<H", self.data, self.part[".gnu.version"][0] + 2 * i, index)

    def place(self, version: str) -> int:
        """Offset of the version's text, 0 where the file has none."""
        begin, size = self.part[".dynstr"]
        found = self.data.find(b"\0" + version.encode() + b"\0", begin, begin + size)
        return max(0, found + 1 - begin)

    def write(self) -> None:
        for _, at, entries in self.files:
            version, _, name, first, step = HEADER.unpack_from(self.data, at)
            HEADER.pack_into(self.data, at, version, len(entries), name, first, step)
            for i, (index, text) in enumerate(entries):
                onward = ENTRY.size if i + 1 < len(entries) else 0
                ENTRY.pack_into(self.data, at + first + i * ENTRY.size, elf_hash(self.text(text)), 0,
                                index, text, onward)  # fmt: skip
        self.path.write_bytes(self.data)


def wanted(needs: Needs, file: list, floor: tuple[int, ...]) -> dict[int, str]:
    """Of one library's names: the older version of each that is too new, by its place in .dynsym.

    "": none, because the name was not libc's then.
    """
    library, _, entries = file
    too_new = {
        index: needs.text(text) for index, text in entries if number(needs.text(text)) > floor
    }
    if not too_new:
        return {}
    host, chosen, lacking = defined(library), {}, []
    for i, (name, undefined) in enumerate(needs.symbols):
        index = needs.version_of(i) & 0x7FFF
        if undefined and index in too_new:
            versions = host.get(name, [])
            old = [v for v in versions if number(v) <= floor]
            if not old or (library == LIBC and not unversioned(versions, floor)):
                lacking.append(f"{name}@{too_new[index]}")
            else:
                chosen[i] = "" if library == LIBC else old[-1]
    if lacking:
        raise FloorError(f"{needs.path.name}: no older version of {', '.join(lacking)}")
    return chosen


def misplaced(path: Path, floor: tuple[int, ...]) -> list[str]:
    """Names that the file seeks in libc under a version that another library had at the floor."""
    needs, host = Needs(path), defined(LIBC)
    old = {
        index
        for library, _, entries in needs.files
        for index, text in entries
        if library == LIBC and number(needs.text(text)) <= floor
    }
    return [
        name
        for i, (name, undefined) in enumerate(needs.symbols)
        if undefined
        and needs.version_of(i) & 0x7FFF in old
        and number(host.get(name, ["GLIBC_0"])[-1]) > floor
    ]


def make_room(path: Path, needs: Needs, versions: set[str]) -> bool:
    """What the file lacks: libraries that must be loaded, texts of versions. Whether it changed."""
    libraries = () if needs.threads_apart else MOVED
    texts = sorted(v for v in versions if not needs.place(v))
    # The name of a library that is needed no more stays in the file's table of texts.
    for option, words in (("--add-needed", (*libraries, *texts)), ("--remove-needed", texts)):
        if words:
            line = ["patchelf", *(word for name in words for word in (option, name)), str(path)]
            subprocess.run(line, check=True)
    return bool(libraries or texts)


def lower(path: Path, floor: tuple[int, ...]) -> list[str]:
    """Binds one library to `floor`; returns what changed, as name@version."""
    for _ in range(2):
        needs = Needs(path)
        chosen = [(file, wanted(needs, file, floor)) for file in needs.files]
        if not any(names for _, names in chosen):
            return []
        versions = {version for _, names in chosen for version in names.values() if version}
        if not make_room(path, needs, versions):
            break
    else:
        raise FloorError(f"{path.name}: patchelf left no room for {', '.join(sorted(versions))}")
    changed = []
    for file, names in chosen:
        gone = {index for index, text in file[2] if number(needs.text(text)) > floor}
        spare = sorted(gone)
        kept = [entry for entry in file[2] if entry[0] not in gone]
        by_version = {needs.text(text): index for index, text in kept}
        for i, version in names.items():
            if version and version not in by_version:
                if not spare:
                    raise FloorError(f"{path.name}: no room in the table of versions for {version}")
                by_version[version] = spare.pop(0)
                kept.append([by_version[version], needs.place(version)])
            needs.set_version(i, by_version[version] if version else ANY)
            changed.append(f"{needs.symbols[i][0]}@{version}")
        file[2] = kept
    needs.write()
    return sorted(changed)


def main(argv: list[str]) -> int:
    if len(argv) < 2 or not number("GLIBC_" + argv[0]):
        print(__doc__.split("\n\n")[1], file=sys.stderr)
        return 2
    for library in map(Path, argv[1:]):
        try:
            changed = lower(library, number("GLIBC_" + argv[0]))
        except FloorError as error:
            print(f"tools/wheels/floor.py: {error}", file=sys.stderr)
            return 3
        print(f"{library.name}: {len(changed)} names bound to glibc {argv[0]} or older")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
