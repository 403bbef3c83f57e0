"""The MMDiT is diffusers' FluxTransformer2DModel: same numbers, same gradients, same files."""

import json

import pytest
import torch
from diffusers import FluxTransformer2DModel

from models.convert import diffusers_config, from_diffusers, load_weights, save_diffusers, to_diffusers
from models.layers import local_attend
from models.mmdit import MMDiT
from tests.models.cases import CHANNELS, batch, randomise, small_config


def twins(guidance: bool) -> tuple[MMDiT, FluxTransformer2DModel]:
    config = small_config(guidance_embed=guidance)
    theirs = randomise(FluxTransformer2DModel(**diffusers_config(config, CHANNELS)))
    ours = MMDiT(config, CHANNELS)
    ours.load_state_dict(from_diffusers(theirs.state_dict(), config))
    return ours, theirs


@pytest.mark.parametrize("guidance", [False, True])
def test_velocity_and_gradients_equal_diffusers(guidance):
    ours, theirs = twins(guidance)
    config = small_config(guidance_embed=guidance)
    tokens, lengths = batch([((2, 3, 4), b"seven"), ((2, 3, 4), b"three")])
    text_WE, pooled_SP = torch.randn(10, config.text.features), torch.randn(2, config.text.pooled)
    guidance_S = torch.rand(2) * 4 if guidance else None
    velocity = ours(tokens, text_WE, pooled_SP, local_attend(lengths), guidance_S)
    expected = theirs(
        hidden_states=tokens.latent_VC.view(2, 24, CHANNELS),
        encoder_hidden_states=text_WE.view(2, 5, -1),
        pooled_projections=pooled_SP,
        timestep=tokens.time_S,
        img_ids=tokens.position_T3[5:29].float(),
        txt_ids=torch.zeros(5, 3),
        guidance=guidance_S,
    ).sample.flatten(0, 1)
    torch.testing.assert_close(velocity, expected, rtol=1e-5, atol=1e-5)

    weight = torch.randn_like(velocity)
    (velocity * weight).sum().backward()
    (expected * weight).sum().backward()
    theirs_grad = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, grad in from_diffusers(theirs_grad, config).items():
        error = (ours.get_parameter(name).grad - grad).norm() / grad.norm()
        assert error < 1e-5, (name, error)


@pytest.mark.parametrize("guidance", [False, True])
def test_conversion_is_a_round_trip_both_ways(guidance):
    ours, theirs = twins(guidance)
    config = small_config(guidance_embed=guidance)
    there = to_diffusers(ours.state_dict(), config)
    back = from_diffusers(there, config)
    assert there.keys() == theirs.state_dict().keys() and back.keys() == ours.state_dict().keys()
    for name, value in theirs.state_dict().items():
        assert torch.equal(there[name], value), name
    for name, value in ours.state_dict().items():
        assert torch.equal(back[name], value), name


@pytest.mark.parametrize("shard_bytes", [2**30, 30_000])
def test_a_saved_folder_is_read_by_diffusers_and_by_us(tmp_path, shard_bytes):
    ours, theirs = twins(False)
    config = small_config()
    save_diffusers(ours.state_dict(), tmp_path, config, CHANNELS, shard_bytes)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_bytes < 2**20)
    loaded = FluxTransformer2DModel.from_pretrained(tmp_path)
    for name, value in theirs.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    for name, value in from_diffusers(load_weights(tmp_path), config).items():
        assert torch.equal(ours.state_dict()[name], value), name


def test_a_folder_that_diffusers_sharded_is_read(tmp_path):
    ours, theirs = twins(True)
    theirs.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for name, value in from_diffusers(load_weights(tmp_path), small_config(guidance_embed=True)).items():
        assert torch.equal(ours.state_dict()[name], value), name


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path):
    ours, theirs = twins(False)
    state = theirs.state_dict()
    with pytest.raises(ValueError, match=r"transformer_blocks\.1\.attn\.to_k\.weight is missing"):
        from_diffusers(
            {k: v for k, v in state.items() if k != "transformer_blocks.1.attn.to_k.weight"}, small_config()
        )
    with pytest.raises(ValueError, match="extra is one of 1 weights"):
        from_diffusers({**state, "extra": torch.zeros(1)}, small_config())
    with pytest.raises(ValueError, match=r"single_blocks\.2\.modulation\.linear\.weight is missing"):
        to_diffusers(ours.state_dict(), small_config(single_blocks=3))
    with pytest.raises(ValueError, match="holds 0 safetensors files"):
        load_weights(tmp_path)
    save_diffusers(ours.state_dict(), tmp_path, small_config(), CHANNELS, 30_000)
    index = next(tmp_path.glob("*.index.json"))
    held = json.loads(index.read_text())
    held["weight_map"]["ghost"] = next(iter(held["weight_map"].values()))
    index.write_text(json.dumps(held))
    with pytest.raises(ValueError, match="lacks ghost"):
        load_weights(index)
    with pytest.raises(ValueError, match="mlp_ratio=4"):
        diffusers_config(small_config(mlp_ratio=2.0), CHANNELS)
