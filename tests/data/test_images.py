"""Every kind of picture becomes upright RGB on the declared background, or is refused with a reason."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data.images import probe_picture, read_picture
from tests.data.media import RED, encoded, picture

GRAY = (90, 90, 90)
WHITE = (255, 255, 255)


def read(
    content: bytes, size: tuple[int, int] = (8, 8), background: tuple[int, int, int] = WHITE
) -> np.ndarray:
    return read_picture(content, size, background)


def solid(content: bytes, **options: Any) -> tuple[int, int, int]:
    """The one colour of the picture; fails if it has two."""
    pixels_HW3 = read(content, **options)
    assert pixels_HW3.dtype == np.uint8 and pixels_HW3.shape == (8, 8, 3)
    assert (pixels_HW3 == pixels_HW3[0, 0]).all()
    red, green, blue = pixels_HW3[0, 0].tolist()
    return red, green, blue


def palette(index: int, transparency: Any) -> bytes:
    image = Image.new("P", (16, 16), index)
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    return encoded(image, transparency=transparency)


@pytest.mark.parametrize(
    ("content", "colour"),
    [
        (picture(colour=RED), RED),
        (picture(mode="L", colour=90), GRAY),
        (picture(mode="1", colour=1), WHITE),
        (picture(mode="LA", colour=(90, 255)), GRAY),
        (picture(mode="LA", colour=(90, 0)), (10, 20, 30)),
        (picture(mode="RGBA", colour=(*RED, 255)), RED),
        (picture(mode="RGBA", colour=(*RED, 0)), (10, 20, 30)),
        (picture(mode="RGBA", colour=(210, 120, 30, 51)), (50, 40, 30)),
        (palette(1, 0), (0, 255, 0)),
        (palette(0, 0), (10, 20, 30)),
        (palette(2, bytes([255, 255, 0])), (10, 20, 30)),
        (picture(mode="RGB", colour=RED, transparency=RED), (10, 20, 30)),
        (picture(mode="L", colour=90, transparency=90), (10, 20, 30)),
        (picture(mode="I;16", colour=30000), (117, 117, 117)),
        (picture(mode="I;16", colour=30000, kind="TIFF"), (117, 117, 117)),
        (picture(mode="I;16", colour=65535), WHITE),
        (picture(mode="I", colour=30000, kind="TIFF"), (117, 117, 117)),
        (picture(mode="F", colour=0.5, kind="TIFF"), (128, 128, 128)),
        (picture(mode="RGBA", colour=(*RED, 0), kind="WEBP", lossless=True), (10, 20, 30)),
        (picture(mode="P", colour=0, kind="GIF"), (0, 0, 0)),
    ],
)
def test_every_mode_becomes_rgb_on_the_declared_background(
    content: bytes, colour: tuple[int, int, int]
) -> None:
    assert solid(content, background=(10, 20, 30)) == colour


@pytest.mark.parametrize("mode", ["CMYK", "L", "RGB"])
def test_a_jpeg_of_any_mode_is_close_to_its_colours(mode: str) -> None:
    source = Image.new("RGB", (16, 16), RED).convert(mode)
    want = np.asarray(source.convert("RGB"))[0, 0].astype(int)
    assert np.abs(np.array(solid(encoded(source, "JPEG"))) - want).max() <= 3


def test_colours_hidden_under_alpha_never_show() -> None:
    """Half opaque gray, half transparent red: no red may bleed over the edge when the picture is resized."""
    image = Image.new("RGBA", (64, 64), (255, 0, 0, 0))
    image.paste((90, 90, 90, 255), (0, 0, 31, 64))
    pixels_HW3 = read(encoded(image), background=GRAY).astype(int)
    assert np.abs(pixels_HW3 - 90).max() <= 1


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("turn", range(1, 9))
def test_exif_orientation_counts_in_the_size_and_in_the_pixels(kind: str, turn: int) -> None:
    stored = Image.new("RGB", (40, 20), (0, 0, 0))
    stored.paste((255, 255, 255), (0, 0, 20, 10))  # bright at the stored top left
    exif = Image.Exif()
    exif[0x0112] = turn
    content = encoded(stored, kind, exif=exif, **({"quality": 95} if kind in ("JPEG", "WEBP") else {}))
    size = (40, 20) if turn < 5 else (20, 40)
    assert probe_picture(content) == size
    corners = read(content, size)[[2, 2, -3, -3], [2, -3, 2, -3], 0] > 128
    where = {1: 0, 2: 1, 3: 3, 4: 2, 5: 0, 6: 1, 7: 3, 8: 2}[
        turn
    ]  # top left, top right, bottom left, bottom right
    assert corners.tolist() == [number == where for number in range(4)]


def test_orientation_six_of_40_by_20_is_20_by_40() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    content = picture(40, 20, kind="JPEG", exif=exif)
    assert probe_picture(content) == (20, 40) and read(content, (20, 40)).shape == (40, 20, 3)


@pytest.mark.parametrize("turn", [0, 9, 255])
def test_an_orientation_that_does_not_exist_turns_nothing(turn: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    content = picture(40, 20, kind="JPEG", exif=exif)
    assert probe_picture(content) == (40, 20) and read(content, (40, 20)).shape == (20, 40, 3)


def test_a_broken_exif_does_not_lose_the_picture() -> None:
    assert probe_picture(picture(40, 20, kind="JPEG", exif=b"Exif\0\0garbage")) == (40, 20)


def png_of(width: int, height: int) -> bytes:
    """A small PNG that declares any size: what a decompression bomb looks like before decoding."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress(bytes(100_000), 9)
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("size", [(10_000, 10_000), (40_000, 40_000), (100_000_000, 1)])
def test_a_decompression_bomb_is_refused_before_decoding(size: tuple[int, int]) -> None:
    with pytest.raises(Exception, match="pixels"):
        probe_picture(png_of(*size))


@pytest.mark.parametrize(
    "content",
    [
        picture(256, 256, kind="JPEG")[:-300],
        encoded(Image.effect_noise((64, 64), 50), "JPEG")[:900],
        encoded(Image.effect_noise((64, 64), 50), "PNG")[:900],
        b"<html></html>",
        b"",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    ],
)
def test_what_is_no_whole_picture_raises(content: bytes) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011  # each decoder has its own
        read(content)


def test_only_the_first_frame_of_an_animated_picture_counts() -> None:
    first, second = Image.new("RGB", (8, 8), RED), Image.new("RGB", (8, 8), GRAY)
    content = io.BytesIO()
    first.save(content, "PNG", save_all=True, append_images=[second])
    assert solid(content.getvalue()) == RED


def test_a_large_jpeg_is_drafted_without_losing_its_picture() -> None:
    noise = Image.effect_noise((16, 16), 90).convert("RGB").resize((1600, 1600), Image.Resampling.NEAREST)
    small = read(encoded(noise, "JPEG", quality=95), (16, 16)).astype(int)
    want = np.asarray(noise.resize((16, 16), Image.Resampling.LANCZOS)).astype(int)
    assert np.abs(small - want).mean() < 3


def test_real_pictures_of_scikit_learn_are_read() -> None:
    from sklearn.datasets import load_sample_images

    for pixels in load_sample_images().images:
        image = Image.fromarray(pixels)
        assert probe_picture(encoded(image)) == (640, 427)
        want = np.asarray(image.resize((96, 64), Image.Resampling.LANCZOS))
        assert (read(encoded(image), (96, 64)) == want).all()
