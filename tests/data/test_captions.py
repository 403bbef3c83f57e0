"""Every caption is defined, one line of valid UTF-8, and cut where a character ends."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.captions import clean, cut, read_captions
from data.loader import Loader
from data.manifest import open_manifest
from tests.data.media import config, picture, tar


@pytest.mark.parametrize(
    ("content", "caption"),
    [
        (b"", ""),
        (b" \t\r\n ", ""),
        (b"\xef\xbb\xbfa cat", "a cat"),
        (b"\xff\xfea\0 \0c\0", "a c"),
        (b"\xfe\xff\0a\0 \0c", "a c"),
        (b"bad \xff byte", "bad \ufffd byte"),
        (b"two\r\nlines\rthree", "two lines three"),
        (b"a\0b", "a b"),
        ("caf\u00e9 \u732b".encode(), "caf\u00e9 \u732b"),
        (b"x" * 50_000, "x" * 50_000),
    ],
)
def test_text_is_cleaned(content: bytes, caption: str) -> None:
    assert read_captions(content, "txt") == [caption]


@pytest.mark.parametrize(
    ("value", "captions"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ({"caption": "a"}, ["a"]),
        ({"captions": ["a", "b"]}, ["a", "b"]),
        ({"caption": ["a", "b"]}, ["a", "b"]),
        ({"caption": None, "captions": ["b"]}, ["b"]),
        (["a", None, 3, " b "], ["a", "b"]),
        (None, []),
        ({"caption": None}, []),
        ({"caption": {"text": "a"}}, []),
        ({"width": 3}, []),
        ([], []),
        (7, []),
    ],
)
def test_json_has_a_declared_reading(value: object, captions: list[str]) -> None:
    assert read_captions(json.dumps(value).encode(), "json") == captions


@pytest.mark.parametrize("content", [b"", b"{", b"not json", b"[" * 100_000])
def test_what_is_not_json_is_said(content: bytes) -> None:
    with pytest.raises(ValueError, match="not JSON"):
        read_captions(content, "json")


def test_half_a_surrogate_pair_is_no_crash() -> None:
    assert read_captions(b'"a \\ud83d b"', "json")[0].encode()


@given(st.text(), st.integers(0, 40))
def test_a_cut_caption_is_a_prefix_in_valid_utf8(text: str, most: int) -> None:
    text = clean(text)
    kept = cut(text, most)
    assert len(kept) <= most and text.startswith(kept.decode())
    assert len(kept) > most - 4 or kept.decode() == text


def test_captions_of_a_list_take_turns_by_epoch_and_cuts_are_counted(tmp_path) -> None:
    members = [("a.png", picture(4, 4)), ("a.json", b'["first", "second", "third is long"]')]
    settings = config(str(tar(tmp_path / "a.tar", members)), max_text=8)
    manifest = open_manifest(settings)
    assert manifest.cut_captions == 1

    def captions(state=None, count=7) -> list[bytes]:
        batches = iter(Loader(settings, manifest, batch_tokens=12, rank=0, ranks=1, seed=3, state=state))
        found = [next(batches) for _ in range(count)]
        states.append(found[3].state if count > 3 else None)
        return [bytes(sample.text_W) for batch in found for sample in batch.samples]

    states: list = []
    whole = captions()
    assert whole[:4] == [b"first", b"second", b"third is", b"first"]
    assert captions(states[0], 3) == whole[4:]
