"""Captions out of .txt and .json members: cleaned, and cut at a character's end."""

import codecs
import json
from typing import Any


def read_captions(content: bytes, extension: str) -> list[str]:
    """All captions of a member, cleaned; [] where it holds none, ValueError where it is not JSON.

    A .txt member is one caption. A .json member is a string, a list of them, or an object whose `caption` or
    `captions` is one of these; null and other types are none. An empty caption counts.
    """
    if extension == "txt":
        return [clean(decode(content))]
    try:
        value = json.loads(decode(content))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if isinstance(value, dict):
        value = value.get("caption") if value.get("caption") is not None else value.get("captions")
    texts: list[Any] = value if isinstance(value, list) else [value]
    return [clean(text) for text in texts if isinstance(text, str)]


def decode(content: bytes) -> str:
    """UTF-8, or UTF-16 where its byte order mark says so; invalid bytes become U+FFFD."""
    utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return content.decode("utf-16" if utf16 else "utf-8", errors="replace")


def clean(text: str) -> str:
    """One line without byte order marks or NUL; white space of any kind is one space, none at the ends."""
    text = text.replace("\ufeff", "").replace("\0", " ")
    # Half of a surrogate pair, which JSON can hold, has no UTF-8.
    return " ".join(text.encode("utf-8", errors="replace").decode("utf-8").split())


def cut(text: str, most: int) -> bytes:
    """The caption's UTF-8 in at most `most` bytes, without a broken last character."""
    return text.encode("utf-8")[:most].decode("utf-8", errors="ignore").encode("utf-8")
