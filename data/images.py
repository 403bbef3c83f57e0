"""Pictures of any mode to RGB uint8, upright, on a declared background.

H x W pixels; sizes are (width, height) as in Pillow.
"""

import io

import numpy as np
from PIL import Image, UnidentifiedImageError

EXTENSIONS = frozenset(
    ("jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff", "avif", "jp2", "tga", "ppm")
)
# Only decoders that run no other program (EPS starts Ghostscript) and trust no outside file.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000", "TGA")
MAX_PIXELS = 2**26

ORIENTATION = 0x0112
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def probe_picture(content: bytes) -> tuple[int, int]:
    """(width, height) after orientation, from the header alone; raises what Pillow raises, or ValueError."""
    with open_picture(content) as image:
        width, height = image.size
        return (height, width) if orientation(image) >= 5 else (width, height)


def read_picture(content: bytes, size: tuple[int, int], background: tuple[int, int, int]) -> np.ndarray:
    """uint8 [H, W, 3] of an upright picture in the given size."""
    with open_picture(content) as image:
        turn = orientation(image)
        # JPEG decodes at 1/2, 1/4 or 1/8 for less; twice the size keeps the filter's quality.
        image.draft(None, (2 * max(size), 2 * max(size)))
        image.load()
        upright = image.transpose(UPRIGHT[turn]) if turn in UPRIGHT else image
        upright.info = image.info
        return resize_rgb(upright, size, background)


def open_picture(content: bytes) -> Image.Image:
    if not content:
        raise ValueError("0 bytes")
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError("it is no picture of a known format") from None
    if not 0 < image.width * image.height <= MAX_PIXELS:
        image.close()
        raise ValueError(f"{image.width}x{image.height} pixels; it must be between 1 and {MAX_PIXELS}")
    return image


def is_animated(content: bytes) -> bool:
    with open_picture(content) as image:
        return bool(getattr(image, "is_animated", False))


def orientation(image: Image.Image) -> int:
    """EXIF orientation 1 to 8; a PNG's counts only before the pixels (else Pillow would decode them)."""
    if image.format == "PNG" and not image.info.keys() & {"exif", "Raw profile type exif"}:
        return 1
    if image.format == "TIFF":  # Pillow turns it while loading, and gives its upright size before
        return 1
    try:
        turn = int(image.getexif().get(ORIENTATION, 1))
        return turn if 1 <= turn <= 8 else 1
    except Exception:  # EXIF is a side note: a broken one must not lose the picture
        return 1


def resize_rgb(image: Image.Image, size: tuple[int, int], background: tuple[int, int, int]) -> np.ndarray:
    """uint8 [H, W, 3]; laid on `background` before resizing, so colours hidden under alpha never bleed."""
    image = to_eight_bits(image)
    if "transparency" in image.info or image.mode in ("LA", "PA", "La", "RGBA", "RGBa"):
        under = Image.new("RGBA", image.size, (*background, 255))
        image = Image.alpha_composite(under, image.convert("RGBA"))
    return np.asarray(image.convert("RGB").resize(size, Image.Resampling.LANCZOS))


def to_eight_bits(image: Image.Image) -> Image.Image:
    """Gray of 16 or 32 bits scaled by 1/257 (Pillow would clip it); floats of at most 1 scaled by 255."""
    if image.mode not in ("I", "F") and not image.mode.startswith("I;16"):
        return image
    values_HW = np.asarray(image, np.float64)
    if image.mode == "F":
        values_HW = np.nan_to_num(values_HW, nan=0.0, posinf=255.0, neginf=0.0)
        scaled_HW = values_HW * (255 if values_HW.max(initial=0) <= 1 else 1)
    else:
        scaled_HW = values_HW / 257
    gray = Image.fromarray(np.clip(np.rint(scaled_HW), 0, 255).astype(np.uint8))
    hidden = image.info.get("transparency")
    if isinstance(hidden, int):
        gray.putalpha(Image.fromarray(np.where(values_HW == hidden, 0, 255).astype(np.uint8)))
    return gray
