"""A caption encoder over bytes, trained with the denoiser.

S captions of U bytes in all, padded to L bytes and one start token; D width, E features, P pooled width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import TextConfig

START = 256


def caption_bytes(caption: str, max_bytes: int) -> bytes:
    """UTF-8 bytes of a caption, cut before the first character that does not fit whole."""
    return caption.encode()[:max_bytes].decode(errors="ignore").encode()


class TextBlock(nn.Module):
    """A pre-norm transformer block over padded captions."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x_SLD: Tensor, mask_S11L: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x_SLD)).unflatten(2, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_S11L)
        x_SLD = x_SLD + self.out(out.transpose(1, 2).flatten(2))
        return x_SLD + self.mlp(self.mlp_norm(x_SLD))


class TextEncoder(nn.Module):
    """Captions -> a feature vector for each byte and a pooled vector for each caption.

    Every caption starts with a token of its own, whose output is pooled: so an empty caption is one like any
    other, and what it learns is the unconditional case.
    """

    def __init__(self, config: TextConfig):
        super().__init__()
        self.max_bytes = config.max_bytes
        self.byte = nn.Embedding(START + 1, config.width)
        self.position = nn.Embedding(config.max_bytes + 1, config.width)
        self.blocks = nn.ModuleList(TextBlock(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.features = nn.Linear(config.width, config.features)
        self.pooled = nn.Linear(config.width, config.pooled)

    def forward(self, caption_U: Tensor, caption_len_S: Tensor) -> tuple[Tensor, Tensor]:
        """Bytes and lengths -> [U, E], [S, P]; ValueError for a caption of more than max_bytes."""
        longest = max(
            caption_len_S.tolist(), default=0
        )  # waits for the device unless the lengths are on the CPU
        if longest > self.max_bytes:
            raise ValueError(f"a caption of {longest} bytes exceeds model.text.max_bytes={self.max_bytes}")
        device, columns = caption_U.device, longest + 1
        caption_len_S = caption_len_S.to(device)
        n_captions, n_bytes = len(caption_len_S), len(caption_U)
        row_U = torch.repeat_interleave(caption_len_S, output_size=n_bytes)
        start_S = caption_len_S.cumsum(0) - caption_len_S
        place_U = row_U * columns + 1 + torch.arange(n_bytes, device=device) - start_S[row_U]
        byte_N = torch.full((n_captions * columns,), START, device=device)
        byte_N[place_U] = caption_U.long()
        column_L = torch.arange(columns, device=device)
        x_SLD = self.byte(byte_N.view(n_captions, columns)) + self.position(column_L)
        mask_S11L = (column_L <= caption_len_S[:, None])[:, None, None]
        for block in self.blocks:
            x_SLD = block(x_SLD, mask_S11L)
        x_SLD = self.norm(x_SLD)
        return self.features(x_SLD.flatten(0, 1).index_select(0, place_U)), self.pooled(x_SLD[:, 0])
