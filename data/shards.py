"""From what the user wrote to shards: brace lists, folders, globs, URLs; each to a file on this machine."""

import glob
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import braceexpand

from data.config import DataConfig, DataError
from data.remote import fetch, is_remote


def cache_folder(config: DataConfig) -> Path:
    if config.cache:
        return Path(config.cache).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "knapformer"


def list_shards(source: str, shards: str | Sequence[str] | None) -> list[str]:
    """Paths and URLs in the order written, none twice; DataError for what names no shard."""
    written = [shards] if isinstance(shards, str) else list(shards or [])
    if not any(written):
        raise DataError(
            f"data.sources.{source}.shards is empty; give a path, folder, URL, brace list or list of them"
        )
    urls = [
        url
        for entry in written
        for pattern in expand_braces(source, str(entry))
        for url in expand(source, pattern)
    ]
    for url, times in Counter(urls).items():
        if times > 1:
            raise DataError(
                f"data.sources.{source}.shards names {url} {times} times; raise its weight instead"
            )
    return urls


def expand_braces(source: str, pattern: str) -> list[str]:
    if os.path.exists(pattern):
        return [pattern]
    try:
        return list(braceexpand.braceexpand(pattern))
    except ValueError as error:  # braceexpand's UnbalancedBracesError is one
        raise DataError(f"data.sources.{source}.shards={pattern} is no brace list: {error}") from None


def expand(source: str, url: str) -> list[str]:
    if url.startswith("file:"):
        url = url.removeprefix("file:").removeprefix("//")
    if is_remote(url):
        return [url]
    path = os.path.expanduser(url)
    if os.path.isdir(path):
        found = sorted(glob.glob(os.path.join(glob.escape(path), "*.tar")))
        if not found:
            raise DataError(f"the folder {url} of data.sources.{source}.shards holds no .tar file")
        return found
    if not os.path.exists(path) and glob.has_magic(path):
        found = sorted(glob.glob(path))
        if not found:
            raise DataError(f"nothing matches {url} of data.sources.{source}.shards")
        return found
    return [path]


def locate(url: str, config: DataConfig, cancelled: Callable[[], bool]) -> Path:
    """The shard's file on this machine, fetched if it must be; DataError where there is none."""
    if is_remote(url):
        return fetch(url, cache_folder(config), config.timeout, config.retries, cancelled)
    if not os.path.isfile(url):
        raise DataError(f"the shard {url} does not exist")
    return Path(url)


def short_names(urls: Sequence[str]) -> list[str]:
    """File names without .tar; the whole path or URL where two would be the same."""
    names = [os.path.basename(url.split("?")[0].rstrip("/")).removesuffix(".tar") or url for url in urls]
    times = Counter(names)
    return [name if times[name] == 1 else url for name, url in zip(names, urls, strict=True)]
