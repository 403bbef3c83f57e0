"""What a model is made of; every preset in conf/model is one ModelConfig."""

from dataclasses import dataclass, field


@dataclass
class TextConfig:
    """The byte-level caption encoder: `features` is the width of a byte's vector, `pooled` of a caption's."""

    width: int = 128
    heads: int = 4
    layers: int = 2
    max_bytes: int = 256
    features: int = 128
    pooled: int = 128


@dataclass
class ModelConfig:
    """A denoiser: `mmdit` has double_blocks, then single_blocks; `dit` has plain blocks.

    The three rope_axes are the parts of a head that rotate with t, h and w. `absolute` also adds sines and
    cosines of the positions to the visual tokens, as DiT does; small models learn faster with them, FLUX has
    none. guidance_embed adds the input of guidance-distilled FLUX weights.
    """

    arch: str = "mmdit"
    width: int = 128
    heads: int = 4
    double_blocks: int = 1
    single_blocks: int = 3
    blocks: int = 4
    mlp_ratio: float = 4.0
    rope_axes: list[int] = field(default_factory=lambda: [8, 12, 12])
    rope_theta: float = 10000.0
    absolute: bool = False
    guidance_embed: bool = False
    text: TextConfig = field(default_factory=TextConfig)

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def depth(self) -> int:
        """Blocks of whatever kind."""
        return self.double_blocks + self.single_blocks if self.arch == "mmdit" else self.blocks


@dataclass
class FlowConfig:
    """Flow times: sigmoid of normal(mean, std), then moved towards noise the more the more tokens there are.

    shift_low and shift_high are FLUX's mu at 256 and at 4096 visual tokens (0.5 and 1.15 there); both zero is
    no shift.
    """

    mean: float = 0.0
    std: float = 1.0
    shift_low: float = 0.0
    shift_high: float = 0.0


def check_model(config: ModelConfig) -> None:
    """Raise ValueError for the first rule that the configuration breaks."""
    if config.arch not in ("mmdit", "dit"):
        raise ValueError(f"model.arch={config.arch} is not one of mmdit, dit")
    for name in (
        "width",
        "heads",
        "text.width",
        "text.heads",
        "text.max_bytes",
        "text.features",
        "text.pooled",
    ):
        if (value := _get(config, name)) < 1:
            raise ValueError(f"model.{name}={value} must be at least 1")
    for name in ("double_blocks", "single_blocks", "blocks", "text.layers"):
        if (value := _get(config, name)) < 0:
            raise ValueError(f"model.{name}={value} must not be negative")
    for where, part in (("model", config), ("model.text", config.text)):
        if part.width % part.heads:
            raise ValueError(f"{where}.width={part.width} is not a multiple of {where}.heads={part.heads}")
    axes = list(config.rope_axes)
    if len(axes) != 3 or any(axis < 0 or axis % 2 for axis in axes):
        raise ValueError(f"model.rope_axes={axes} must be three even numbers, for t, h and w")
    if sum(axes) != config.head_size:
        raise ValueError(
            f"model.rope_axes={axes} must add up to the head size, width/heads={config.head_size}"
        )
    if config.mlp_ratio <= 0 or config.rope_theta <= 0:
        raise ValueError(
            f"model.mlp_ratio={config.mlp_ratio} and model.rope_theta={config.rope_theta} must be positive"
        )
    if config.guidance_embed and config.arch != "mmdit":
        raise ValueError("model.guidance_embed=true needs model.arch=mmdit")


def _get(config: ModelConfig, name: str) -> int:
    return getattr(config.text, name.removeprefix("text.")) if "." in name else getattr(config, name)
