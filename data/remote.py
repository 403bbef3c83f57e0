"""Fetching a shard whole into a cache: once, whatever the number of processes, and never a part of it."""

import fcntl
import hashlib
import os
import select
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from webdataset.gopen import gopen

from data.config import DataError
from data.tar import is_complete

CHUNK = 1 << 18
LEAST_RATE = 1024  # bytes a second; a connection below it counts as stalled


class TransferError(OSError):
    """The transfer failed in a way that another attempt may mend."""


def is_remote(url: str) -> bool:
    return "://" in url or url.startswith("pipe:")


def never() -> bool:
    return False


def fetch(
    url: str, folder: Path, timeout: float, retries: int, cancelled: Callable[[], bool] = never
) -> Path:
    """Path of the whole shard in the cache; DataError when all attempts failed.

    The name holds the hash of the whole URL. A lock that dies with its process guards the one partial file,
    which the next process overwrites; the finished file appears by renaming.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"{hashlib.sha256(url.encode()).hexdigest()[:32]}.tar"
    if final.exists():
        return final
    with locked(final.with_suffix(".lock"), cancelled):
        if final.exists():
            return final
        part = final.with_suffix(".part")
        try:
            attempt_all(url, part, timeout, retries, cancelled)
            os.replace(part, final)
        finally:
            part.unlink(missing_ok=True)
    return final


def attempt_all(url: str, part: Path, timeout: float, retries: int, cancelled: Callable[[], bool]) -> None:
    for attempt in range(retries + 1):
        try:
            return transfer(url, part, timeout, cancelled)
        except urllib.error.HTTPError as error:
            reason = f"HTTP status {error.code}"
            if error.code < 500 and error.code not in (408, 429):
                break
        except Exception as error:  # each library has its own; all of them mean that the transfer failed
            reason = str(error) or type(error).__name__
        if cancelled():
            break
        if attempt < retries:
            time.sleep(min(timeout, 0.5 * 2**attempt))
    raise DataError(f"{url} could not be fetched in {attempt + 1} attempts: {reason}")


def transfer(url: str, part: Path, timeout: float, cancelled: Callable[[], bool]) -> None:
    with open(part, "wb") as file:
        chunks = (
            http_chunks(url, timeout) if url.startswith(("http:", "https:")) else pipe_chunks(url, timeout)
        )
        certain = False
        for chunk in chunks:
            if isinstance(chunk, bool):
                certain = chunk
            else:
                file.write(chunk)
            if cancelled():
                raise TransferError("cancelled")
        file.flush()
        os.fsync(file.fileno())
    # A closed connection without a declared length and a pipe's last byte look the same whole or cut.
    if not certain and not is_complete(part):
        raise TransferError(f"what came is no complete tar ({part.stat().st_size} bytes)")


def http_chunks(url: str, timeout: float) -> Iterator[bytes | bool]:
    """The body; first whether the protocol says where it ends."""
    with urllib.request.urlopen(url, timeout=timeout) as response:
        declared = response.length
        yield declared is not None or bool(response.chunked)
        received, pace = 0, Pace(timeout)
        while chunk := response.read1(CHUNK):
            received += len(chunk)
            yield chunk
            pace.check(received)
        if declared is not None and received != declared:
            raise TransferError(f"the connection closed after {received} of {declared} bytes")


def pipe_chunks(url: str, timeout: float) -> Iterator[bytes | bool]:
    """The output of webdataset's command for the URL (pipe:, gs:, s3:, hf: ...), which must exit with 0."""
    pipe = gopen(url, "rb", bufsize=0)
    process: subprocess.Popen = pipe.proc
    output = process.stdout
    assert output is not None
    received, pace = 0, Pace(timeout)
    try:
        while True:
            if not select.select([output], [], [], timeout)[0]:
                raise TransferError(f"no data for {timeout:g} seconds")
            chunk = os.read(output.fileno(), CHUNK)
            if not chunk:
                break
            received += len(chunk)
            yield chunk
            pace.check(received)
        if status := process.wait(timeout):
            raise TransferError(f"the command exited with {status} after {received} bytes")
    finally:
        process.kill()
        output.close()
        process.wait()


class Pace:
    """Ends a trickle, which never trips a read's own time-out: every `timeout` seconds must bring some."""

    def __init__(self, timeout: float) -> None:
        self.timeout, self.since, self.before = timeout, time.monotonic(), 0

    def check(self, received: int) -> None:
        seconds, came = time.monotonic() - self.since, received - self.before
        if seconds < self.timeout:
            return
        if came < seconds * LEAST_RATE:
            raise TransferError(f"only {came} bytes came in {seconds:.1f} seconds")
        self.since, self.before = time.monotonic(), received


@contextmanager
def locked(path: Path, cancelled: Callable[[], bool]) -> Iterator[None]:
    """Exclusive among the processes that share the folder; the system frees it when its holder dies."""
    with open(path, "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if cancelled():
                    raise TransferError("cancelled") from None
                time.sleep(0.1)
        yield
