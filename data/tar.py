"""Every member of a tar file, and every region where members were lost.

Tar readers stop without a word at a damaged header or a cut, so the scan is done here: header by header, each
with its checksum, and on past the damage to the next good header.
"""

import io
import os
import tarfile
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

BLOCK = tarfile.BLOCKSIZE
MAGIC, MAGIC_AT = b"ustar", 257
WINDOW = 1 << 20
REST = "what followed is lost"
END_MARK: type[tarfile.HeaderError] = tarfile.EOFHeaderError  # type: ignore[attr-defined]


class Member(NamedTuple):
    """A file in the tar; `problem` says why its content cannot be read, if it cannot."""

    name: str
    offset: int
    size: int
    problem: str = ""


class Damage(NamedTuple):
    """Something is missing after the first `after` members; `name` is that of the member hit, if legible."""

    after: int
    name: str
    reason: str


@dataclass
class Contents:
    members: list[Member] = field(default_factory=list)
    damages: list[Damage] = field(default_factory=list)

    def damage(self, name: str, reason: str) -> None:
        self.damages.append(Damage(len(self.members), name, reason))


def scan(file: BinaryIO) -> Contents:
    """All members of a seekable tar, also of several tars in a row; what is wrong with it raises nothing."""
    contents, size = Contents(), file.seek(0, os.SEEK_END)
    reader = header_reader(file)
    offset, ended = 0, False
    if reason := not_a_tar(file, size):
        contents.damage("", reason)
        return contents
    while offset < size:
        file.seek(offset)
        try:
            info = tarfile.TarInfo.fromtarfile(reader)
            if info.size < 0 or reader.offset <= offset:
                raise ValueError("impossible size")
        except END_MARK:
            # Zeros end a tar; what follows the padding is another one, as `cat a.tar b.tar` leaves it.
            ended, offset = True, next_content(file, offset, size)
            continue
        except OSError:
            raise
        except Exception as error:  # tarfile's own, and whatever a damaged extended header sets off in it
            found = next_header(file, offset + BLOCK, size)
            what = "is cut inside a header" if offset + BLOCK > size else f"has a bad header ({error})"
            rest = f"read on at byte {found}" if found < size else REST
            contents.damage(partial_name(file, offset), f"the tar {what} at byte {offset} of {size}; {rest}")
            offset = found
            continue
        ended, offset, name = False, reader.offset, printable(info.name)
        if info.offset_data + (info.size if info.isreg() else 0) > size:
            contents.damage(name, f"the tar is cut inside {name} at byte {size}; {REST}")
            return contents
        if not info.isdir():
            contents.members.append(Member(name, info.offset_data, info.size, problem(info)))
    if not ended and not contents.damages:
        contents.damage("", f"the tar is cut: no end mark after member {len(contents.members)}; {REST}")
    return contents


def header_reader(file: BinaryIO) -> tarfile.TarFile:
    """What TarInfo.fromtarfile reads from: it knows pax, GNU and old headers, and raises at a bad one."""
    reader = tarfile.TarFile(fileobj=io.BytesIO(bytes(2 * BLOCK)), encoding="utf-8")
    reader.fileobj = file
    return reader


def is_complete(path: str | os.PathLike) -> bool:
    """The tar has no damage and ends with an end mark."""
    with open(path, "rb") as file:
        return not scan(file).damages


def not_a_tar(file: BinaryIO, size: int) -> str:
    file.seek(0)
    start = file.read(BLOCK)
    if not start:
        return "the file is empty"
    for magic, kind in (
        (b"\x1f\x8b", "gzip"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"BZh", "bzip2"),
        (b"\xfd7z", "xz"),
    ):
        if start.startswith(magic):
            return f"it is compressed ({kind}); unpack it, since samples are read by their offset"
    try:
        tarfile.TarInfo.frombuf(start, "utf-8", "surrogateescape")
    except END_MARK:
        return ""
    except tarfile.HeaderError:
        if start[MAGIC_AT : MAGIC_AT + 5] != MAGIC and next_header(file, 0, size) >= size:
            return f"it is no tar file: it begins with {start[:24]!r}"
    return ""


def next_header(file: BinaryIO, offset: int, size: int) -> int:
    """Offset of the next block that is a sound header, or the file's size."""
    while offset < size:
        file.seek(offset)
        window = file.read(WINDOW + BLOCK)
        at = window.find(MAGIC)
        while at >= 0:
            start = at - MAGIC_AT
            if (
                start >= 0
                and start % BLOCK == 0
                and start < WINDOW
                and is_header(window[start : start + BLOCK])
            ):
                return offset + start
            at = window.find(MAGIC, at + 1)
        offset += WINDOW
    return size


def next_content(file: BinaryIO, offset: int, size: int) -> int:
    """Offset of the next block that is not zeros, or the file's size."""
    while offset < size:
        file.seek(offset)
        window = file.read(WINDOW)
        if zeros := len(window) - len(window.lstrip(b"\0")):
            offset += zeros // BLOCK * BLOCK if zeros < len(window) else len(window)
        if not zeros or zeros < len(window):
            return offset
    return size


def is_header(block: bytes) -> bool:
    try:
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def partial_name(file: BinaryIO, offset: int) -> str:
    """The name field of a damaged header, where it still is one."""
    file.seek(offset)
    name = file.read(100).split(b"\0")[0].decode("utf-8", errors="replace")
    return name if name.isprintable() else ""


def printable(name: str) -> str:
    """Bytes that are not UTF-8 and characters that do not print, such as a line's end, as escapes."""
    name = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def problem(info: tarfile.TarInfo) -> str:
    if info.issym() or info.islnk():
        return f"it is a link to {info.linkname}, which is not followed"
    if not info.isreg() or info.issparse():
        return "it is no plain file"
    return ""
