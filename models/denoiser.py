"""The whole trainable model: caption encoder and transformer behind one call."""

import torch
from torch import Tensor, nn

from models.config import ModelConfig, check_model
from models.dit import DiT
from models.layers import FinalLayer, Modulation
from models.mmdit import MMDiT
from models.text import TextEncoder
from models.tokens import Attend, Tokens


class Denoiser(nn.Module):
    """Tokens on this rank -> the velocity of its latents.

    Inputs meet the parameters' dtype inside. FSDP's mixed precision needs cast_forward_inputs=False: else
    flow times are rounded to bfloat16 before they are embedded, by up to 2 of their 1000 steps.
    """

    def __init__(self, config: ModelConfig, channels: int):
        super().__init__()
        self.text = TextEncoder(config.text)
        self.core = MMDiT(config, channels) if config.arch == "mmdit" else DiT(config, channels)

    def forward(self, tokens: Tokens, attend: Attend) -> Tensor:
        """[V, C] float32 velocity, noise minus data."""
        features_UE, pooled_SP = self.text(tokens.caption_U, tokens.caption_len_S)
        return self.core(tokens, features_UE.index_select(0, tokens.text_W), pooled_SP, attend)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw every parameter anew from torch's generator; the model starts as velocity zero."""
        self.apply(_init_module)
        for module in self.modules():
            if isinstance(module, Modulation | FinalLayer):
                nn.init.zeros_(module.linear.weight)


def _init_module(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding | nn.LayerNorm | nn.RMSNorm):
        module.reset_parameters()


def build_denoiser(config: ModelConfig, channels: int) -> Denoiser:
    """A denoiser of latents with `channels` channels; ValueError for a configuration that cannot be.

    Under torch.device("meta") it costs nothing; then `to_empty` and `init_weights`.
    """
    check_model(config)
    if channels < 1:
        raise ValueError(f"{channels} latent channels: there must be at least 1")
    denoiser = Denoiser(config, channels)
    denoiser.init_weights()
    return denoiser
