"""The plain DiT (Peebles and Xie, arXiv 2212.09748) over packed tokens, with the caption in context.

Text and visual tokens are one stream that shares all weights. Letters as in mmdit.
"""

from torch import Tensor, nn

from models.config import ModelConfig
from models.layers import Conditioning, DoorLinear, FinalLayer, LatentIn, Packing, Stream, attend_rotated
from models.tokens import Attend, Tokens


class Block(nn.Module):
    """Attention, then MLP, both modulated."""

    def __init__(self, width: int, heads: int, mlp_ratio: float):
        super().__init__()
        self.stream = Stream(width, heads, mlp_ratio)

    def forward(self, x_TD: Tensor, cond_SD: Tensor, packing: Packing, attend: Attend) -> Tensor:
        mod = self.stream.modulation(cond_SD)
        q, k, v = self.stream.before(x_TD, mod, packing.sequence_T)
        out_THK = attend_rotated(q, k, v, packing, attend)
        return self.stream.after(x_TD, out_THK, mod, packing.sequence_T)


class DiT(nn.Module):
    """The velocity of packed latents given text features, in one stream."""

    def __init__(self, config: ModelConfig, channels: int):
        super().__init__()
        self.rope_axes, self.rope_theta = tuple(config.rope_axes), config.rope_theta
        self.latent_in = LatentIn(channels, config)
        self.text_in = DoorLinear(config.text.features, config.width)
        self.conditioning = Conditioning(config.width, config.text.pooled)
        self.blocks = nn.ModuleList(
            Block(config.width, config.heads, config.mlp_ratio) for _ in range(config.blocks)
        )
        self.final = FinalLayer(config.width, channels)

    def forward(self, tokens: Tokens, text_WE: Tensor, pooled_SP: Tensor, attend: Attend) -> Tensor:
        """[V, C] float32 velocity of tokens.latent_VC; the captions in `tokens` are not looked at."""
        packing = Packing.of(tokens, self.rope_axes, self.rope_theta)
        cond_SD = self.conditioning(tokens.time_S, pooled_SP)
        x_TD = packing.pack(self.text_in(text_WE), self.latent_in.embed(tokens))
        for block in self.blocks:
            x_TD = block(x_TD, cond_SD, packing, attend)
        _, visual_VD = packing.unpack(x_TD)
        return self.final(visual_VD, cond_SD, packing.sequence_V)
