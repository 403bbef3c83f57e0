"""The index of a shard: which samples it holds, where their bytes are, how large each is, and what is lost.

Built once by reading the shard, then kept as JSON beside it, or in the cache folder where it cannot be.
It holds facts only; what a user configures is applied by the manifest.
"""

import hashlib
import json
import os
import posixpath
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import av
import PIL

from data import images, video
from data.captions import read_captions
from data.config import DataError
from data.samples import Report, reason_of
from data.tar import Contents, Damage, Member, scan

VERSION = 1
CAPTIONS = frozenset(("txt", "json"))
MEDIA = images.EXTENSIONS | video.EXTENSIONS
MAX_MEMBER = 1 << 31  # bytes; a member is read whole


class Place(NamedTuple):
    """Bytes of a member in its shard, and their CRC-32."""

    offset: int
    size: int
    crc: int


class Entry(NamedTuple):
    """A sample as the shard holds it: `lacks` says why there is no caption, `cut` how a clip ends early."""

    key: str
    kind: str  # picture | clip
    media: Place
    caption: Place | None
    extension: str  # of the caption
    lengths: list[int]  # bytes of each caption, uncut
    width: int
    height: int
    seconds: float
    cut: str
    lacks: str


@dataclass
class ShardIndex:
    entries: list[Entry]
    lost: list[Report]
    digest: str  # of all that a sample is made of, wherever the shard lies
    run: int  # most samples lost in a row


@dataclass
class Group:
    """The members of one key, each with its extension."""

    media: list[tuple[Member, str]] = field(default_factory=list)
    captions: list[tuple[Member, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def index_shard(path: Path, name: str, cache: Path) -> ShardIndex:
    """The stored index if it belongs to this file's size and time, else a new one, which is stored."""
    status = os.stat(path)
    # What can be decoded depends on the decoders.
    stamp: list[int | str] = [VERSION, PIL.__version__, av.__version__, status.st_size, status.st_mtime_ns]
    places = stored_at(path, cache)
    for place in places:
        if (stored := load(place, stamp, name)) is not None:
            return stored
    with open(path, "rb") as file:
        index = build_index(file, name)
    after = os.stat(path)
    if (after.st_size, after.st_mtime_ns) != (status.st_size, status.st_mtime_ns):
        raise DataError(f"the shard {path} changed while it was indexed; start again when it is complete")
    for place in places:
        if store(place, stamp, index):
            break
    return index


def build_index(file: BinaryIO, name: str) -> ShardIndex:
    """Scans and probes every member of an open shard."""
    contents = scan(file)
    groups, lost = group_members(contents, name)
    damaged = damaged_keys(contents)
    entries: list[Entry] = []
    run = longest = 0
    for key, group in groups.items():
        for item in read_group(file, key, group, damaged.get(key, "")):
            if isinstance(item, Entry):
                entries.append(item)
                run = 0
            else:
                lost.append(replace(item, shard=name))
                run += item.samples
                longest = max(longest, run)
    lost += damage_reports(contents, groups, {report.key for report in lost if report.samples}, name)
    digest = hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:16]
    return ShardIndex(entries, lost, digest, longest)


def damage_reports(contents: Contents, groups: dict[str, Group], lost: set[str], name: str) -> list[Report]:
    """One for each damage; it counts a sample that left no trace but a legible name."""
    reports = []
    for damage in contents.damages:
        key = split_name(damage.name)[0]
        unseen = bool(key) and key not in groups and not lost & set(beside(contents, damage))
        reports.append(Report(name, key if unseen else "", damage.reason, int(unseen)))
    return reports


def split_name(name: str) -> tuple[str, str]:
    """(key, extension in lower case): split at the last dot of the base name, a leading ./ dropped.

    `v1.0 final.jpg` has the key `v1.0 final`, `dir.v1/x.jpg` has `dir.v1/x`, and a name without a dot, or
    with its only dot in front, has no extension. Keys are names, never paths: nothing is written under them.
    """
    name = name.removeprefix("./")
    folder, base = posixpath.split(name)
    stem, extension = os.path.splitext(base)
    return posixpath.join(folder, stem), extension[1:].lower()


def group_members(contents: Contents, name: str) -> tuple[dict[str, Group], list[Report]]:
    """Members by key, wherever they lie in the shard, and notes of those that are not read."""
    groups: dict[str, Group] = {}
    unread: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for member in contents.members:
        key, extension = split_name(member.name)
        apple = posixpath.basename(member.name).startswith("._")
        if apple or extension not in MEDIA | CAPTIONS:
            kind = "._*" if apple else f".{extension}" if extension else "no extension"
            unread[kind] += 1
            examples.setdefault(kind, member.name)
            continue
        group = groups.setdefault(key, Group())
        if member.problem:
            group.problems.append(f"{member.name}: {member.problem}")
        else:
            (group.captions if extension in CAPTIONS else group.media).append((member, extension))
    notes = [
        Report(name, examples[kind], f"{count} members are not read ({kind})", 0)
        for kind, count in unread.items()
    ]
    return groups, notes


def damaged_keys(contents: Contents) -> dict[str, str]:
    """Keys next to a damage, with its reason: what they lack was probably lost there."""
    return {
        key: damage.reason
        for damage in contents.damages
        for key in (*beside(contents, damage), split_name(damage.name)[0])
    }


def beside(contents: Contents, damage: Damage) -> list[str]:
    """Keys of the members before and after."""
    return [
        split_name(member.name)[0] for member in contents.members[max(damage.after - 1, 0) : damage.after + 1]
    ]


def read_group(file: BinaryIO, key: str, group: Group, damage: str) -> Iterator[Entry | Report]:
    """One entry for each picture or clip of the key; the second is `key#2`, and so on.

    As many captions as media (or more) pair up in order; fewer are shared, the last one by those left over. A
    .txt goes before a .json of the same key. What lacks a caption next to a damage of the tar is lost,
    whatever the policy for missing captions.
    """
    problems = [*group.problems, damage] if damage else group.problems
    if not group.media:
        yield Report("", key, "; ".join(["it has no picture or clip", *problems]))
        return
    texts = [pair for pair in group.captions if pair[1] == "txt"] or group.captions
    for number, (member, extension) in enumerate(group.media):
        name = key if number == 0 else f"{key}#{number + 1}"
        text = texts[min(number, len(texts) - 1)] if texts else None
        entry = read_entry(file, name, member, extension, text)
        if isinstance(entry, Entry) and entry.lacks and problems:
            lacks = "; ".join([entry.lacks, *problems])
            entry = Report("", key, lacks) if damage else entry._replace(lacks=lacks)
        yield entry
    for one in group.problems:
        yield Report("", key, one, 0)
    for member, _ in texts[len(group.media) :]:
        yield Report("", key, f"{member.name} is not read: the key has more captions than pictures", 0)


def read_entry(
    file: BinaryIO, key: str, member: Member, extension: str, text: tuple[Member, str] | None
) -> Entry | Report:
    if member.size > MAX_MEMBER:
        return Report("", key, f"{member.name} has {member.size} bytes; the most is {MAX_MEMBER}")
    content = read_at(file, member)
    try:
        kind, width, height, seconds, cut = probe(content, extension)
    except Exception as error:  # decoders raise whatever they like at a broken file
        return Report("", key, f"{member.name} cannot be read: {reason_of(error)}")
    media = Place(member.offset, member.size, zlib.crc32(content))
    caption, lengths, lacks = None, [], "it has no caption"
    if text is not None:
        content = read_at(file, text[0])
        caption = Place(text[0].offset, text[0].size, zlib.crc32(content))
        try:
            lengths = [len(one.encode()) for one in read_captions(content, text[1])]
            lacks = "" if lengths else f"{text[0].name} holds no caption"
        except ValueError as error:
            lacks = f"{text[0].name} holds no caption: {error}"
    written = text[1] if text else ""
    return Entry(key, kind, media, caption, written, lengths, width, height, seconds, cut, lacks)


def probe(content: bytes, extension: str) -> tuple[str, int, int, float, str]:
    """(kind, width, height, seconds, cut); a GIF is a clip if it moves."""
    if extension in video.EXTENSIONS or (extension == "gif" and images.is_animated(content)):
        facts = video.probe_clip(content)
        return "clip", facts.width, facts.height, facts.seconds, facts.cut
    return "picture", *images.probe_picture(content), 0.0, ""


def read_at(file: BinaryIO, place: Member | Place) -> bytes:
    file.seek(place.offset)
    return file.read(place.size)


def stored_at(path: Path, cache: Path) -> list[Path]:
    hashed = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]
    return [path.with_name(path.name + ".index.json"), cache / f"{hashed}.index.json"]


def load(place: Path, stamp: list[int | str], name: str) -> ShardIndex | None:
    """None where there is no index, or not that of this file."""
    try:
        stored: dict[str, Any] = json.loads(place.read_text())
        if stored["stamp"] != stamp:
            return None
        entries = [
            Entry(key, kind, Place(*media), Place(*caption) if caption else None, *rest)
            for key, kind, media, caption, *rest in stored["entries"]
        ]
        lost = [Report(**(report | {"shard": name})) for report in stored["lost"]]
        return ShardIndex(entries, lost, stored["digest"], stored["run"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store(place: Path, stamp: list[int | str], index: ShardIndex) -> bool:
    """Atomically, so that processes may race; False where the folder is not writable."""
    lost = [asdict(report) for report in index.lost]
    content = json.dumps(
        {"stamp": stamp, "digest": index.digest, "run": index.run, "lost": lost, "entries": index.entries}
    )
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=".index-") as folder:
            written = Path(folder, place.name)
            written.write_text(content)
            os.replace(written, place)
    except OSError:
        return False
    return True
