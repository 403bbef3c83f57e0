"""Laws of both transformers behind their one face."""

import copy
import dataclasses

import pytest
import torch

from models.denoiser import build_denoiser
from models.layers import local_attend
from models.tokens import Tokens
from tests.models.cases import CHANNELS, batch, gradients, randomise, small_config

both = pytest.mark.parametrize("arch", ["mmdit", "dit"])

MIXED = [
    ((1, 3, 2), b"hello"),
    ((3, 2, 2), b""),
    ((1, 1, 1), b"a longer caption"),
    ((1, 0, 0), b"text alone"),
]


def build(arch: str):
    return randomise(build_denoiser(small_config(arch=arch), CHANNELS))


@both
def test_packed_sequences_equal_each_alone(arch):
    model = build(arch)
    tokens, lengths = batch(MIXED)
    together = model(tokens, local_attend(lengths))
    at = 0
    for row, (grid, caption) in enumerate(MIXED):
        n = grid[0] * grid[1] * grid[2]
        alone, alone_lengths = batch([(grid, caption)])
        alone = dataclasses.replace(
            alone, latent_VC=tokens.latent_VC[at : at + n], time_S=tokens.time_S[row : row + 1]
        )
        torch.testing.assert_close(
            model(alone, local_attend(alone_lengths)), together[at : at + n], rtol=1e-5, atol=1e-5
        )
        at += n


@both
def test_the_order_of_tokens_in_a_sequence_does_not_matter(arch):
    model = build(arch)
    tokens, lengths = batch([((2, 2, 2), b"order"), ((1, 2, 2), b"x")])
    moved = torch.cat((torch.randperm(13), 13 + torch.randperm(5)))  # old place of each new one
    place = moved.argsort()
    shuffled = dataclasses.replace(
        tokens,
        place_W=place[tokens.place_W],
        place_V=place[tokens.place_V],
        sequence_T=tokens.sequence_T[moved],
        position_T3=tokens.position_T3[moved],
    )
    attend = local_attend(lengths)
    torch.testing.assert_close(model(shuffled, attend), model(tokens, attend), rtol=1e-5, atol=1e-5)


@both
@pytest.mark.parametrize(
    "cases",
    [
        [],
        [((1, 0, 0), b"abc")],
        [((1, 2, 2), b"")],
        [((1, 0, 0), b"")],
        [((1, 0, 0), b""), ((1, 1, 1), b"a")],
    ],
    ids=[
        "nothing",
        "no visual token",
        "no text token",
        "a sequence without tokens",
        "one of two without tokens",
    ],
)
def test_no_gradient_is_missing_or_nan_whatever_is_absent(arch, cases):
    model = build(arch)
    tokens, lengths = batch(cases)
    velocity = model(tokens, local_attend(lengths))
    assert velocity.shape == tokens.latent_VC.shape and velocity.dtype == torch.float32
    for name, grad in gradients(model, velocity.square().sum()).items():
        assert grad is not None, name
        assert grad.isfinite().all(), name
        assert len(tokens.latent_VC) or not grad.any(), name


@both
def test_every_parameter_matters(arch):
    model = build(arch)
    tokens, lengths = batch(MIXED)
    for name, grad in gradients(model, model(tokens, local_attend(lengths)).square().sum()).items():
        # A bias on all keys of a softmax cancels, and only the last text rows have no reader.
        assert grad is not None and grad.abs().max() > 1e-7, name


@both
def test_a_caption_and_a_time_reach_only_their_own_sequence(arch):
    model = build(arch)
    tokens, lengths = batch([((1, 2, 2), b"abc"), ((1, 2, 3), b"def")])
    before = model(tokens, local_attend(lengths))
    caption = tokens.caption_U.clone()
    caption[4] += 1
    for change in ({"caption_U": caption}, {"time_S": tokens.time_S + torch.tensor([0.0, 0.1])}):
        after = model(dataclasses.replace(tokens, **change), local_attend(lengths))
        torch.testing.assert_close(after[:4], before[:4], rtol=0, atol=0)
        assert (after[4:] - before[4:]).abs().max() > 1e-4


@both
def test_a_split_sequence_equals_the_whole_when_attention_sees_the_rest(arch):
    """A part's rows; `attend` supplies the keys and values of the rest, as between ranks."""
    model = build(arch)
    tokens, lengths = batch([((1, 3, 3), b"seven")])
    whole_kv = []

    def record(q, k, v):
        whole_kv.append((k, v))
        return local_attend(lengths)(q, k, v)

    whole = model(tokens, record)
    here = torch.arange(len(tokens.sequence_T)) >= 3  # the last two text tokens and all visual ones
    calls = iter(whole_kv)

    def attend_to_all(q, k, v):
        k_all, v_all = next(calls)
        torch.testing.assert_close(k, k_all[here], rtol=1e-5, atol=1e-5)
        heads_first = (x.transpose(0, 1)[None] for x in (q, k_all, v_all))
        return torch.nn.functional.scaled_dot_product_attention(*heads_first)[0].transpose(0, 1)

    part = Tokens(
        latent_VC=tokens.latent_VC,
        time_S=tokens.time_S,
        caption_U=tokens.caption_U,
        caption_len_S=tokens.caption_len_S,
        text_W=tokens.text_W[3:],
        place_W=tokens.place_W[3:] - 3,
        place_V=tokens.place_V - 3,
        sequence_T=tokens.sequence_T[here],
        position_T3=tokens.position_T3[here],
    )
    torch.testing.assert_close(model(part, attend_to_all), whole, rtol=1e-5, atol=1e-5)


@both
def test_a_new_model_is_velocity_zero_and_a_meta_model_becomes_the_same_kind(arch):
    config = small_config(arch=arch)
    torch.manual_seed(5)
    direct = build_denoiser(config, CHANNELS)
    with torch.device("meta"):
        deferred = build_denoiser(config, CHANNELS)
    deferred.to_empty(device="cpu")
    for parameter in deferred.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    torch.manual_seed(5)
    deferred.init_weights()
    again = copy.deepcopy(direct)
    torch.manual_seed(5)
    again.init_weights()
    for name, value in deferred.state_dict().items():
        torch.testing.assert_close(value, again.state_dict()[name], rtol=0, atol=0)
    tokens, lengths = batch(MIXED)
    assert not deferred(tokens, local_attend(lengths)).any()


@both
def test_bfloat16_parameters_give_float32_velocity_near_the_float32_one(arch):
    model = build(arch)
    tokens, lengths = batch(MIXED)
    exact = model(tokens, local_attend(lengths))
    rough = model.to(torch.bfloat16)(tokens, local_attend(lengths))
    assert rough.dtype == torch.float32
    assert (rough - exact).norm() < 0.05 * exact.norm()
