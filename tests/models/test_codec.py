"""Laws of the pixel codec."""

import pytest
import torch

from models.codec import PixelCodec


def test_decoding_what_was_encoded_gives_the_same_pixels():
    codec = PixelCodec(patch=2, patch_time=3)
    pixels_VC = torch.randint(0, 256, (2 * 4 * 5, codec.channels), dtype=torch.uint8)
    latent_VC = codec.encode(pixels_VC)
    assert latent_VC.min() >= -1 and latent_VC.max() <= 1
    frames = codec.decode(latent_VC, (2, 4, 5))
    assert frames.shape == (6, 8, 10, 3) and frames.dtype == torch.uint8
    for t, h, w, dt, dh, dw in ((0, 0, 0, 0, 0, 0), (1, 3, 4, 2, 1, 1), (1, 0, 2, 1, 0, 1)):
        row = pixels_VC[(t * 4 + h) * 5 + w].view(3, 2, 2, 3)
        assert torch.equal(frames[t * 3 + dt, h * 2 + dh, w * 2 + dw], row[dt, dh, dw])


def test_every_byte_survives():
    codec = PixelCodec(patch=16, patch_time=1)
    pixels_VC = torch.arange(256, dtype=torch.uint8).repeat(3)[None]
    assert torch.equal(codec.decode(codec.encode(pixels_VC), (1, 1, 1)).flatten(), pixels_VC.flatten())


def test_values_out_of_range_are_clipped():
    codec = PixelCodec(patch=1, patch_time=1)
    assert codec.decode(torch.tensor([[-3.0, 0.0, 9.0]]), (1, 1, 1)).flatten().tolist() == [0, 128, 255]


def test_a_grid_that_does_not_fit_is_refused():
    codec = PixelCodec(patch=2, patch_time=1)
    with pytest.raises(ValueError, match=r"\(3, 12\) do not fill a grid of \(1, 2, 2\)"):
        codec.decode(torch.zeros(3, 12), (1, 2, 2))
