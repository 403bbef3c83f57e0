"""A shard that comes over a network is whole, or there is an error; never a part of it in silence."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from data.config import DataError
from data.manifest import open_manifest
from data.remote import fetch
from tests.data.media import config, pairs, tar


class Shards(BaseHTTPRequestHandler):
    """Serves one tar; the first `spoilt` requests fail in the way that their path names."""

    body = b""
    spoilt = 0
    requests = 0

    def do_GET(self) -> None:
        cls = type(self)
        cls.requests += 1
        way = self.path.strip("/").split("/")[0] if cls.requests <= cls.spoilt else "whole"
        half = len(self.body) // 2
        if way == "missing":
            return self.send_error(404)
        if way == "busy":
            return self.send_error(503)
        self.send_response(200)
        if way not in ("half-unsized", "unsized"):
            self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        if way == "unsized" or way == "whole":
            self.wfile.write(self.body)
        elif way == "page":
            self.wfile.write(b"<html>".ljust(len(self.body)))
        else:
            self.wfile.write(self.body[:half])
            self.wfile.flush()
            if way == "stall":
                time.sleep(3)
            elif way == "trickle":
                for byte in self.body[half : half + 45]:
                    self.wfile.write(bytes([byte]))
                    self.wfile.flush()
                    time.sleep(0.1)
            elif way == "slow":
                time.sleep(4)
                self.wfile.write(self.body[half:])

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serving(body: bytes, spoilt: int) -> Iterator[tuple[str, type[Shards]]]:
    handler = type("Handler", (Shards,), {"body": body, "spoilt": spoilt, "requests": 0})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def body(tmp_path: Path) -> bytes:
    return tar(tmp_path / "body.tar", pairs(20)).read_bytes()


@pytest.mark.parametrize("way", ["half-sized", "half-unsized", "stall", "trickle", "busy"])
def test_a_transfer_that_fails_once_is_retried_and_whole(tmp_path: Path, body: bytes, way: str) -> None:
    with serving(body, spoilt=1) as (url, handler):
        path = fetch(f"{url}/{way}/a.tar", tmp_path / "cache", timeout=1.5, retries=3)
        assert path.read_bytes() == body and handler.requests >= 2


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("half-sized", "closed after"),
        ("half-unsized", "no complete tar"),
        ("stall", "timed out"),
        ("trickle", "bytes came in"),
        ("busy", "status 503"),
        ("missing", "status 404"),
    ],
)
def test_a_transfer_that_never_succeeds_is_an_error_and_leaves_nothing(
    tmp_path: Path, body: bytes, way: str, words: str
) -> None:
    with serving(body, spoilt=99) as (url, handler):
        address = f"{url}/{way}/a.tar"
        with pytest.raises(DataError, match=words) as failure:
            open_manifest(config(address, cache=str(tmp_path / "cache"), timeout=1.5, retries=1))
        assert address in str(failure.value) and "\n" not in str(failure.value)
        assert handler.requests == (1 if way == "missing" else 2)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_shard_is_fetched_once_and_read_like_a_local_one(tmp_path: Path, body: bytes) -> None:
    with serving(body, spoilt=0) as (url, handler):
        given = config(f"{url}/unsized/a-{{0..1}}.tar", cache=str(tmp_path / "cache"), timeout=20.0)
        for _ in range(2):
            manifest = open_manifest(given)
            assert manifest.samples == 40 and not manifest.reports
        assert handler.requests == 2


def test_a_page_in_place_of_a_shard_is_reported(tmp_path: Path, body: bytes) -> None:
    with serving(body, spoilt=1) as (url, _):
        good = str(tar(tmp_path / "good.tar", pairs(1)))
        manifest = open_manifest(config([f"{url}/page/a.tar", good], cache=str(tmp_path / "cache")))
    assert manifest.samples == 1 and "no tar file" in str(manifest.reports[0])


def test_urls_that_differ_in_any_part_are_two_shards(tmp_path: Path, body: bytes) -> None:
    with serving(body, spoilt=0) as (url, _):
        paths = {fetch(f"{url}/{part}", tmp_path, 1, 0) for part in ("p/a.tar", "q/a.tar", "q/a.tar?v=2")}
    assert len(paths) == 3


def test_a_pipe_must_exit_with_zero_and_be_whole(tmp_path: Path, body: bytes) -> None:
    source = tmp_path / "body.tar"
    manifest = open_manifest(config(f"pipe:cat {source}", cache=str(tmp_path / "cache")))
    assert manifest.samples == 20
    for command, words in (
        (f"head -c 9000 {source}; exit 3", "exited with 3 after 9000 bytes"),
        (f"head -c 9000 {source}", "no complete tar"),
        (f"head -c 9000 {source}; sleep 9", "no data for 1 seconds"),
        ("false", "exited with 1"),
    ):
        with pytest.raises(DataError, match=words):
            fetch(f"pipe:{command}", tmp_path / "cache", timeout=1, retries=1)
    once = f"pipe:test -e {tmp_path}/tried && cat {source} || (touch {tmp_path}/tried; exit 1)"
    assert fetch(once, tmp_path / "cache", timeout=1, retries=1).read_bytes() == body


def fetch_here(url: str, folder: str, results: "multiprocessing.Queue[bytes]") -> None:
    results.put(fetch(url, Path(folder), timeout=10, retries=0).read_bytes())


def test_eight_processes_fetch_once_though_one_is_killed_half_way(tmp_path: Path, body: bytes) -> None:
    with serving(body, spoilt=1) as (url, handler):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["data.remote"])
        results = context.Queue()
        arguments = (f"{url}/slow/a.tar", str(tmp_path / "cache"), results)
        first = context.Process(target=fetch_here, args=arguments)
        first.start()
        while (
            not list(tmp_path.glob("cache/*.part")) or not next(tmp_path.glob("cache/*.part")).stat().st_size
        ):
            time.sleep(0.01)
        others = [context.Process(target=fetch_here, args=arguments) for _ in range(7)]
        for process in others:
            process.start()
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)
        assert all(results.get(timeout=60) == body for _ in others)
        for process in [first, *others]:
            process.join()
        assert handler.requests == 2
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".lock", ".tar"]
