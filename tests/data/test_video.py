"""A clip is what its timestamps say, upright and with square pixels; a broken one is refused in words."""

import io
import os
import resource
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from data.loader import Loader
from data.manifest import open_manifest
from data.video import probe_clip, read_clip
from tests.data.media import clip, config, encoded, ramp, sound_only, tar, with_matrix

WHITE = (255, 255, 255)


def grays(content: bytes, n_frames: int = 8, fps: float = 8.0, seconds: float = 1.0) -> list[int]:
    """The number of the ramp frame shown at each time."""
    frames_FHW3 = read_clip(content, n_frames, fps, (8, 8), seconds, WHITE)
    assert frames_FHW3.shape == (n_frames, 8, 8, 3) and frames_FHW3.dtype == np.uint8
    return [round((float(frame.mean()) - 10) / 10) for frame in frames_FHW3]


def test_frames_are_picked_by_time_not_by_number(tmp_path: Path) -> None:
    content = clip(tmp_path / "a.mp4", 24, fps=24)
    facts = probe_clip(content)
    assert (facts.width, facts.height, facts.frames, facts.cut) == (32, 16, 24, "")
    assert facts.seconds == pytest.approx(1.0)
    assert grays(content, 8, 8.0) == [0, 3, 6, 9, 12, 15, 18, 21]
    assert grays(content, 4, 4.0) == [0, 6, 12, 18]
    assert grays(clip(tmp_path / "b.mp4", 4, fps=4), 8, 8.0) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_varying_rate_is_followed(tmp_path: Path) -> None:
    """Four frames in the first half second, then one that stays."""
    with av.open(str(tmp_path / "a.mkv"), "w") as container:
        stream = container.add_stream("ffv1", rate=8)
        stream.width, stream.height, stream.pix_fmt = 16, 16, "yuv420p"
        for number, time in enumerate((0, 1, 2, 3, 4, 8)):
            frame = av.VideoFrame.from_ndarray(ramp(number, 16, 16), format="rgb24")
            frame.pts = time
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    assert grays((tmp_path / "a.mkv").read_bytes(), 9, 8.0) == [0, 1, 2, 3, 4, 4, 4, 4, 5]


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        ("a.mkv", "libx264"),
        ("a.mkv", "ffv1"),
        ("a.webm", "libvpx"),
        ("a.flv", "flv"),
        ("a.mpg", "mpeg2video"),
        ("a.ts", "mpeg2video"),
        ("a.avi", "mpeg4"),
        ("a.h264", "libx264"),
    ],
)
def test_containers_that_declare_nothing_are_usable(tmp_path: Path, name: str, codec: str) -> None:
    content = clip(tmp_path / name, 25, codec=codec, fps=25, size=(64, 48))
    facts = probe_clip(content)
    assert (facts.width, facts.height, facts.frames, facts.cut) == (64, 48, 25, "")
    assert facts.seconds == pytest.approx(1.0, abs=0.05)  # an MPEG pack's clock may jump by a frame
    assert grays(content, 5, 5.0) == pytest.approx([0, 5, 10, 15, 20], abs=1)


def test_a_stream_without_a_header_of_duration_is_usable(tmp_path: Path) -> None:
    """Written to a pipe, a container can declare neither frames nor duration afterwards."""

    class Pipe(io.RawIOBase):
        written = b""

        def writable(self) -> bool:
            return True

        def write(self, data) -> int:  # type: ignore[override]
            self.written += bytes(data)
            return len(data)

    for kind, codec in (
        ("matroska", "libx264"),
        ("webm", "libvpx"),
        ("flv", "flv"),
        ("mpegts", "mpeg2video"),
    ):
        pipe = Pipe()
        with av.open(pipe, "w", format=kind) as container:
            stream = container.add_stream(codec, rate=25)
            stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
            for number in range(20):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(ramp(number, 64, 48), format="rgb24")))
            container.mux(stream.encode())
        facts = probe_clip(pipe.written)
        assert (facts.frames, facts.cut) == (20, "") and facts.seconds == pytest.approx(0.8, abs=0.01), kind
        assert grays(pipe.written, 4, 5.0, 0.8) == pytest.approx([0, 5, 10, 15], abs=1)


@pytest.mark.parametrize(
    ("matrix", "size", "where"),
    [
        ((1, 0, 0, 1), (32, 16), 0),
        ((0, 1, -1, 0), (16, 32), 1),  # a quarter turn clockwise, as phones write it
        ((-1, 0, 0, -1), (32, 16), 3),
        ((0, -1, 1, 0), (16, 32), 2),
        ((-1, 0, 0, 1), (32, 16), 1),
        ((1, 0, 0, -1), (32, 16), 2),
        ((0, 1, 1, 0), (16, 32), 0),
    ],
)
def test_the_display_matrix_counts_in_size_and_pixels(
    tmp_path: Path, matrix: tuple[int, int, int, int], size: tuple[int, int], where: int
) -> None:
    frame_HW3 = np.zeros((16, 32, 3), np.uint8)
    frame_HW3[:8, :16] = 255  # bright at the stored top left
    content = with_matrix(clip(tmp_path / "a.mp4", [frame_HW3] * 4), *matrix)
    facts = probe_clip(content)
    assert (facts.width, facts.height) == size
    shown_HW3 = read_clip(content, 1, 8.0, size, facts.seconds, WHITE)[0]
    corners = shown_HW3[[2, 2, -3, -3], [2, -3, 2, -3], 0] > 128
    assert corners.tolist() == [number == where for number in range(4)]


def test_pixels_are_made_square(tmp_path: Path) -> None:
    content = clip(tmp_path / "a.mp4", 4, size=(48, 32), ratio=(4, 3))
    facts = probe_clip(content)
    assert (facts.width, facts.height) == (64, 32)
    facts = probe_clip(with_matrix(content, 0, 1, -1, 0))
    assert (facts.width, facts.height) == (32, 64)


def test_a_still_gif_is_a_picture_and_a_moving_one_a_clip_on_the_background(tmp_path: Path) -> None:
    still = encoded(Image.new("P", (16, 16), 0), "GIF")
    moving = clip(tmp_path / "a.gif", 8, codec="gif", size=(16, 16), pix_fmt="rgb8")
    see_through = io.BytesIO()
    frames = [Image.new("RGBA", (16, 16), (0, 0, 0, 0)) for _ in range(3)]
    for number, frame in enumerate(frames):
        frame.putpixel((number, 0), (255, 0, 0, 255))
    frames[0].save(see_through, "GIF", save_all=True, append_images=frames[1:], duration=250, disposal=2)
    members = [
        member
        for name, content in (("still", still), ("moving", moving), ("through", see_through.getvalue()))
        for member in ((f"{name}.gif", content), (f"{name}.txt", b"t"))
    ]
    settings = config(
        str(tar(tmp_path / "a.tar", members)), picture_pixels=256, clip_pixels=256, background=[9, 9, 9]
    )
    manifest = open_manifest(settings)
    assert manifest.sources[0].clip_N.tolist() == [False, True, True] and not manifest.reports
    batch = next(iter(Loader(settings, manifest, batch_tokens=10_000, rank=0, ranks=1, seed=0)))
    through = next(sample for sample in batch.samples if sample.key.endswith("through"))
    assert through.grid[0] == 6 and (through.patch_VC[-1] == 9).all()


def broken(path: Path) -> dict[str, tuple[bytes, str]]:
    whole = clip(path / "whole.mp4", 8)
    fast = clip(path / "fast.mp4", 8, options={"movflags": "faststart"})
    return {
        "audio": (sound_only(path / "a.m4a"), "no video stream"),
        "header": (fast[: fast.find(b"mdat") - 4], "holds no frame"),
        "moov": (whole[: whole.find(b"moov") - 4], "cannot be read"),
        "one": (clip(path / "one.mp4", 1), "one frame only"),
        "empty": (b"", "0 bytes"),
        "html": (b"<html></html>", "cannot be read"),
        "playlist": (b"#EXTM3U\n#EXTINF:5,\nfile:///etc/hostname\n", "cannot be read"),
    }


def test_what_is_no_clip_is_reported_with_the_reason(tmp_path: Path) -> None:
    cases = broken(tmp_path)
    members = [
        m for name, (content, _) in cases.items() for m in ((f"{name}.mp4", content), (f"{name}.txt", b"t"))
    ]
    good = [("good.mp4", clip(tmp_path / "good.mp4", audio=True)), ("good.txt", b"t")]
    manifest = open_manifest(config(str(tar(tmp_path / "a.tar", [*members, *good]))))
    assert manifest.sources[0].key_N == ["good"] and manifest.lost == len(cases)
    for report in manifest.reports:
        assert cases[report.key][1] in report.reason, report


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_a_clip_cut_in_half_follows_the_policy_and_is_reported(tmp_path: Path, name: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 32, 48, 3), dtype=np.uint8)
    options = {"movflags": "faststart"} if name.endswith("mp4") else {}
    content = clip(tmp_path / name, list(noise), size=(48, 32), options=options)
    half = content[: len(content) // 2]
    members = [(name, half), ("a.txt", b"t"), ("b.png", encoded(Image.new("RGB", (8, 8)))), ("b.txt", b"t")]
    path = str(tar(tmp_path / "a.tar", members))
    manifest = open_manifest(config(path))
    assert manifest.sources[0].key_N == ["b"] and manifest.lost == 1
    assert "s/a: a: the clip is cut" in str(manifest.reports[0])
    settings = config(path, cut_clip="keep", clip_frames=64)
    manifest = open_manifest(settings)
    assert manifest.sources[0].key_N == ["a", "b"] and manifest.lost == 0 and len(manifest.reports) == 1
    assert 2 <= manifest.sources[0].seconds_N[0] <= 6
    batch = next(iter(Loader(settings, manifest, batch_tokens=10_000, rank=0, ranks=1, seed=0)))
    assert not batch.reports and {sample.key for sample in batch.samples} >= {"s/a/a", "s/a/b"}


def test_decoding_that_ends_early_is_an_error_not_a_still(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 48, 3), dtype=np.uint8)
    content = clip(tmp_path / "a.mp4", list(noise), size=(48, 32), options={"movflags": "faststart"})
    with pytest.raises(ValueError, match=r"ends after .* of 4.00 seconds"):
        read_clip(content[: len(content) // 2], 32, 8.0, (8, 8), 4.0, WHITE)


def test_a_thousand_decodes_keep_memory_and_files_flat(tmp_path: Path) -> None:
    content = clip(tmp_path / "a.mp4", 8, size=(64, 64))
    peaks = []
    for _ in range(3):
        for _ in range(400):
            read_clip(content, 8, 8.0, (16, 16), 1.0, WHITE)
        peaks.append((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, len(os.listdir("/proc/self/fd"))))
    assert peaks[2][0] - peaks[0][0] < 8 * 1024  # KiB
    assert peaks[2][1] == peaks[0][1]
