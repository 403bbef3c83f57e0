"""Laws of the caption encoder."""

import pytest
import torch

from models.text import TextEncoder, caption_bytes
from tests.models.cases import randomise, small_config


def encode(encoder: TextEncoder, captions: list[bytes]) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([len(caption) for caption in captions], dtype=torch.int64)
    return encoder(torch.tensor(list(b"".join(captions)), dtype=torch.uint8), lengths)


@pytest.fixture
def encoder() -> TextEncoder:
    return randomise(TextEncoder(small_config().text))


def test_padding_changes_nothing(encoder):
    captions = [b"a seven", b"", b"a much longer caption of thirty one", b"x"]
    features_UE, pooled_SP = encode(encoder, captions)
    at = 0
    for row, caption in enumerate(captions):
        alone_UE, alone_SP = encode(encoder, [caption])
        torch.testing.assert_close(pooled_SP[row], alone_SP[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(features_UE[at : at + len(caption)], alone_UE, rtol=1e-5, atol=1e-6)
        at += len(caption)
    assert at == len(features_UE)


def test_the_order_of_bytes_matters(encoder):
    _, pooled_SP = encode(encoder, [b"left then right", b"right then left"])
    assert (pooled_SP[0] - pooled_SP[1]).abs().max() > 1e-4


def test_no_caption_and_empty_captions_are_ordinary(encoder):
    for captions in ([], [b""], [b"", b""]):
        features_UE, pooled_SP = encode(encoder, captions)
        assert features_UE.shape == (0, 20) and pooled_SP.shape == (len(captions), 12)
        encoder.zero_grad()
        (features_UE.sum() + pooled_SP.sum()).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in encoder.parameters())


def test_a_caption_beyond_max_bytes_is_refused(encoder):
    encode(encoder, [b"x" * 40])
    with pytest.raises(ValueError, match=r"a caption of 41 bytes exceeds model\.text\.max_bytes=40"):
        encode(encoder, [b"x" * 41])


def test_a_caption_is_cut_between_characters():
    assert caption_bytes("seven", 3) == b"sev"
    assert caption_bytes("a\u00e9\u00e9", 4) == "a\u00e9".encode()
    assert caption_bytes("\u4e03", 2) == b""
