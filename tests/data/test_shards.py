"""No sample is lost in silence: whatever is wrong with a shard, its report names shard, key and reason."""

import io
import json
import tarfile
from pathlib import Path

import pytest

from data.config import DataError, SourceConfig
from data.loader import Loader
from data.manifest import Manifest, open_manifest
from data.shards import list_shards
from tests.data.media import BLUE, config, pairs, picture, tar


def keys(manifest: Manifest) -> list[str]:
    return [key for source in manifest.sources for key in source.key_N]


def reasons(manifest: Manifest) -> str:
    return "\n".join(map(str, manifest.reports))


def whole(tmp_path: Path, count: int = 6) -> bytes:
    return tar(tmp_path / "whole.tar", pairs(count)).read_bytes()


def header_of(content: bytes, name: str) -> int:
    with tarfile.open(fileobj=io.BytesIO(content)) as file:
        return file.getmember(name).offset


def beside_a_good_one(tmp_path: Path, content: bytes) -> Manifest:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "a.tar").write_bytes(content)
    tar(folder / "b.tar", pairs(3, "good"))
    manifest = open_manifest(config(str(folder)))
    assert [key for key in keys(manifest) if key.startswith("good")] == ["good0000", "good0001", "good0002"]
    return manifest


@pytest.mark.parametrize(
    ("cut_at", "into", "kept", "lost"),
    [
        ("x0003.png", 0, 3, 0),  # between two samples: nothing is known of what followed
        ("x0003.txt", 0, 3, 1),
        ("x0003.png", 200, 3, 1),
        ("x0003.txt", 200, 3, 1),
        ("x0003.png", 520, 3, 1),
        ("x0003.txt", 515, 3, 1),
    ],
)
def test_a_cut_tar_keeps_what_is_whole_and_reports_the_rest(
    tmp_path: Path, cut_at: str, into: int, kept: int, lost: int
) -> None:
    content = whole(tmp_path)
    manifest = beside_a_good_one(tmp_path, content[: header_of(content, cut_at) + into])
    assert keys(manifest)[:-3] == [f"x{number:04d}" for number in range(kept)]
    assert manifest.lost == lost
    assert "s/a: " in reasons(manifest) and "the tar is cut" in reasons(manifest)
    assert ("x0003" in reasons(manifest)) == bool(lost)


def test_a_damaged_header_costs_its_own_sample_only(tmp_path: Path) -> None:
    content = bytearray(whole(tmp_path))
    content[header_of(bytes(content), "x0002.txt") + 150] ^= 0xFF
    manifest = beside_a_good_one(tmp_path, bytes(content))
    assert keys(manifest)[:-3] == ["x0000", "x0001", "x0003", "x0004", "x0005"]
    assert manifest.lost == 1
    assert "x0002" in reasons(manifest) and "bad header" in reasons(manifest)


def test_a_damaged_first_header_is_no_reason_to_drop_the_shard(tmp_path: Path) -> None:
    content = bytearray(whole(tmp_path))
    content[0] ^= 0xFF
    manifest = beside_a_good_one(tmp_path, bytes(content))
    assert keys(manifest)[:-3] == ["x0001", "x0002", "x0003", "x0004", "x0005"]
    assert manifest.lost == 1


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html>404</html>" * 100, "no tar file"),
        (b"\x1f\x8b" + bytes(600), "compressed"),
    ],
)
def test_a_file_that_is_no_tar_is_reported_and_the_next_shard_is_unaffected(
    tmp_path: Path, content: bytes, why: str
) -> None:
    manifest = beside_a_good_one(tmp_path, content)
    assert len(keys(manifest)) == 3 and why in reasons(manifest) and "s/a: " in reasons(manifest)


def test_tars_joined_by_cat_are_read_whole(tmp_path: Path) -> None:
    content = whole(tmp_path, 2) + tar(tmp_path / "more.tar", pairs(2, "y")).read_bytes()
    (tmp_path / "joined.tar").write_bytes(content)
    manifest = open_manifest(config(str(tmp_path / "joined.tar")))
    assert keys(manifest) == ["x0000", "x0001", "y0000", "y0001"] and not manifest.reports


def test_a_header_that_lies_about_its_size_ends_nothing(tmp_path: Path) -> None:
    content = bytearray(whole(tmp_path))
    start = header_of(bytes(content), "x0002.txt")
    header = content[start : start + 512]
    header[124:136] = b"\xff" * 11 + b"\x01"  # minus 255 in base 256
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    content[start : start + 512] = header
    manifest = beside_a_good_one(tmp_path, bytes(content))
    assert keys(manifest)[:-3] == ["x0000", "x0001", "x0003", "x0004", "x0005"]
    assert manifest.lost == 1 and "impossible size" in reasons(manifest)


def test_a_name_with_a_line_end_stays_on_one_line(tmp_path: Path) -> None:
    members = [("a\nb.png", picture()), ("c\nd.txt", b"t"), ("a\nb.txt", b"t")]
    manifest = open_manifest(config(str(tar(tmp_path / "a.tar", members))))
    assert keys(manifest) == ["a\\nb"] and len(manifest.reports) == 1 and "\n" not in str(manifest.reports[0])


def test_long_and_non_ascii_names_keep_their_keys(tmp_path: Path) -> None:
    names = ["d/" * 60 + "long", "größe", "a b"]
    members = [
        (f"{name}.{end}", picture() if end == "png" else b"t") for name in names for end in ("png", "txt")
    ]
    for kind in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        path = tmp_path / f"{kind}.tar"
        with tarfile.open(path, "w", format=kind) as file:
            for name, content in members:
                info = tarfile.TarInfo(name)
                info.size = len(content)
                file.addfile(info, io.BytesIO(content))
        assert keys(open_manifest(config(str(path)))) == names


def test_equal_keys_are_kept_apart(tmp_path: Path) -> None:
    members = [
        ("x.jpg", picture(kind="JPEG")),
        ("x.txt", b"one"),
        ("x.JPG", picture(kind="JPEG", colour=BLUE)),
    ]
    tar(tmp_path / "a.tar", members)
    tar(tmp_path / "b.tar", [*pairs(1), *pairs(1)])
    manifest = open_manifest(config([str(tmp_path / "a.tar"), str(tmp_path / "b.tar")]))
    assert keys(manifest) == ["x", "x#2", "x0000", "x0000#2"] and not manifest.lost
    batch = next(
        iter(
            Loader(
                config(str(tmp_path / "a.tar")),
                open_manifest(config(str(tmp_path / "a.tar"))),
                batch_tokens=1000,
                rank=0,
                ranks=1,
                seed=0,
            )
        )
    )
    assert {bytes(sample.text_W) for sample in batch.samples} == {b"one"}


def test_the_same_key_in_two_shards_is_two_samples(tmp_path: Path) -> None:
    for folder in ("p", "q"):
        (tmp_path / folder).mkdir()
        tar(tmp_path / folder / "a.tar", pairs(2))
    settings = config([str(tmp_path / "p" / "a.tar"), str(tmp_path / "q" / "a.tar")])
    batch = next(
        iter(Loader(settings, open_manifest(settings), batch_tokens=4 * 21, rank=0, ranks=1, seed=0))
    )
    assert len({sample.key for sample in batch.samples}) == 4


def test_names_have_documented_keys_and_none_is_dropped_in_silence(tmp_path: Path) -> None:
    tar(
        tmp_path / "a.tar",
        [
            *(("v1.0 final.jpg", picture(kind="JPEG")), ("v1.0 final.txt", b"t")),
            *(("dir.v1/x.jpg", picture(kind="JPEG")), ("dir.v1/x.txt", b"t")),
            *(("./y.jpg", picture(kind="JPEG")), ("y.txt", b"t")),
            *(("A.JPG", picture(kind="JPEG")), ("A.TXT", b"t")),
            *(("._a.jpg", b"finder"), ("README", b"read me")),
        ],
    )
    manifest = open_manifest(config(str(tmp_path / "a.tar")))
    assert keys(manifest) == ["v1.0 final", "dir.v1/x", "y", "A"] and not manifest.lost
    assert "._a.jpg" in reasons(manifest) and "README" in reasons(manifest)


def test_members_of_a_key_need_not_be_neighbours(tmp_path: Path) -> None:
    members = sorted(pairs(3), key=lambda member: member[0][-3:])
    assert keys(open_manifest(config(str(tar(tmp_path / "a.tar", members))))) == ["x0000", "x0001", "x0002"]


def test_a_key_that_climbs_writes_nothing_outside(tmp_path: Path) -> None:
    inside = tmp_path / "deep" / "deeper"
    inside.mkdir(parents=True)
    tar(
        inside / "a.tar",
        [
            ("../../etc/x.png", picture()),
            ("../../etc/x.txt", b"t"),
            ("/abs.png", picture()),
            ("/abs.txt", b"t"),
        ],
    )
    settings = config(str(inside / "a.tar"), cache=str(inside / "cache"))
    next(iter(Loader(settings, open_manifest(settings), batch_tokens=100, rank=0, ranks=1, seed=0)))
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "a.tar",
        "a.tar.index.json",
    ]


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    bomb = b"cposix\nsystem\n(S'touch " + str(tmp_path / "gone").encode() + b"'\ntR."
    members = [member for name in ("pkl", "pyd", "pickle") for member in [(f"x0000.{name}", bomb)]]
    settings = config(str(tar(tmp_path / "a.tar", [*pairs(1), *members])))
    manifest = open_manifest(settings)
    next(iter(Loader(settings, manifest, batch_tokens=100, rank=0, ranks=1, seed=0)))
    assert not (tmp_path / "gone").exists()
    assert all(f"(.{name})" in reasons(manifest) for name in ("pkl", "pyd", "pickle"))


def test_missing_parts_follow_the_policy_and_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as file:
        for name, content in [
            ("notext.png", picture()),
            ("nopicture.txt", b"t"),
            ("link.txt", b"t"),
            *pairs(1),
        ]:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
        for name in ("link.png", "x0000.jpg"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, "x0000.png"
            file.addfile(link)
    manifest = open_manifest(config(str(path)))
    assert keys(manifest) == ["x0000"] and manifest.lost == 3
    assert "s/a: notext: it has no caption" in reasons(manifest)
    assert "s/a: nopicture: it has no picture or clip" in reasons(manifest)
    assert "s/a: link: it has no picture or clip; link.png: it is a link" in reasons(manifest)
    assert "s/a: x0000: x0000.jpg: it is a link" in reasons(manifest)
    manifest = open_manifest(config(str(path), missing_caption="empty"))
    assert keys(manifest) == ["notext", "x0000"] and manifest.lost == 2 and "notext" in reasons(manifest)
    with pytest.raises(DataError, match=r"3 samples are lost, more than data.max_failures=2"):
        open_manifest(config(str(path), max_failures=2))


def test_broken_pictures_are_reported_and_a_hundred_in_a_row_stop_the_run(tmp_path: Path) -> None:
    broken = [("h.jpg", b"<html>"), ("h.txt", b"t"), ("z.png", b""), ("z.txt", b"t")]
    manifest = open_manifest(config(str(tar(tmp_path / "a.tar", [*pairs(1), *broken]))))
    assert keys(manifest) == ["x0000"] and manifest.lost == 2
    assert "s/a: h: h.jpg cannot be read" in reasons(manifest) and "0 bytes" in reasons(manifest)
    many = [member for n in range(100) for member in ((f"b{n}.jpg", b"<html>"), (f"b{n}.txt", b"t"))]
    with pytest.raises(DataError, match="100 samples in a row"):
        open_manifest(config(str(tar(tmp_path / "b.tar", [*pairs(1), *many]))))


def test_an_index_is_stored_once_and_renewed_when_its_shard_changes(tmp_path: Path) -> None:
    path = tar(tmp_path / "a.tar", pairs(2))
    open_manifest(config(str(path)))
    stored = tmp_path / "a.tar.index.json"
    before = stored.stat().st_mtime_ns
    assert len(json.loads(stored.read_text())["entries"]) == 2
    assert open_manifest(config(str(path))).samples == 2 and stored.stat().st_mtime_ns == before
    tar(path, pairs(3))
    assert open_manifest(config(str(path))).samples == 3
    stored.write_text("{half")
    assert open_manifest(config(str(path))).samples == 3
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.tar", "a.tar.index.json"]


def test_an_index_that_cannot_lie_beside_its_shard_lies_in_the_cache(tmp_path: Path) -> None:
    (tmp_path / "set" / "a.tar.index.json").mkdir(
        parents=True
    )  # nothing can be written there, not even by root
    settings = config(str(tar(tmp_path / "set" / "a.tar", pairs(2))), cache=str(tmp_path / "cache"))
    assert [open_manifest(settings).samples for _ in range(2)] == [2, 2]
    assert [path.suffixes for path in (tmp_path / "cache").iterdir()] == [[".index", ".json"]]
    assert sorted(path.name for path in (tmp_path / "set").iterdir()) == ["a.tar", "a.tar.index.json"]


def test_reports_outlive_the_stored_index(tmp_path: Path) -> None:
    path = tar(tmp_path / "a.tar", [*pairs(1), ("z.png", b""), ("z.txt", b"t")])
    assert open_manifest(config(str(path))).reports == open_manifest(config(str(path))).reports


def test_what_the_user_wrote_becomes_the_shards(tmp_path: Path) -> None:
    for number in range(3):
        tar(tmp_path / f"a-{number}.tar", pairs(1))
    paths = [str(tmp_path / f"a-{number}.tar") for number in range(3)]
    for written in (str(tmp_path), str(tmp_path / "a-{0..2}.tar"), str(tmp_path / "a-*.tar"), paths):
        assert list_shards("s", written) == paths
    assert list_shards("s", "http://h/a-{00..01}.tar") == ["http://h/a-00.tar", "http://h/a-01.tar"]
    assert list_shards("s", f"file://{paths[0]}") == paths[:1]


def test_user_errors_are_one_sentence_naming_the_value(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    path = str(tar(tmp_path / "a.tar", pairs(1)))
    for shards, words in (
        (str(tmp_path / "none"), "holds no .tar file"),
        (str(tmp_path / "b.tar"), "b.tar does not exist"),
        (str(tmp_path / "b-*.tar"), "nothing matches"),
        ([path, path], "2 times"),
        (None, "is empty"),
        (str(tar(tmp_path / "empty.tar", [])), "no sample that can be read"),
    ):
        with pytest.raises(ValueError, match=words):
            open_manifest(config(shards))
    for settings, words in (
        ({"patch": 0}, "data.patch=0 must be at least 1"),
        ({"oversize": "cry"}, "data.oversize=cry must be one of refuse"),
        ({"background": [1, 2]}, "data.background"),
        ({"clip_fps": 0.0}, "data.clip_fps=0.0"),
        ({"sources": {}}, "data.sources is empty"),
        ({"sources": {"s": SourceConfig(path, weight=0)}}, "every data.sources"),
        ({"sources": {"s": SourceConfig(path, exhausted="x")}}, "exhausted=x"),
    ):
        broken = config(path)
        for name, value in settings.items():
            setattr(broken, name, value)
        with pytest.raises(ValueError, match=words):
            open_manifest(broken)


def test_a_missing_shard_may_be_skipped_but_not_in_silence(tmp_path: Path) -> None:
    path = str(tar(tmp_path / "a.tar", pairs(1)))
    manifest = open_manifest(config([path, str(tmp_path / "b.tar")], missing_shard="skip"))
    assert keys(manifest) == ["x0000"] and "s/b: the whole shard is lost" in reasons(manifest)
