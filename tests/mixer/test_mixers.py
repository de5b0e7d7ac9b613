"""Token mixers: exact limits, invariants, statistics, structure; the laws are in test_laws.py."""

import pytest
import torch

import subquad as sq
from variants import make_mixer, mixer_variants, tokens

F64 = torch.float64


def close(found, wanted, tolerance=1e-12):
    """float64: fewer than 10^3 roundings of 1.1e-16 in a row, with a margin of ten."""
    assert found.shape == wanted.shape
    error = (found - wanted).abs().max().item()
    assert error <= tolerance * wanted.abs().max().item(), f"{error:.3e}"


# ---- fnet ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "width"), [(71, 11), (64, 8), (1, 1), (2, 2), (3, 1), (1, 4)])
def test_fnet_is_the_two_dimensional_transform(length, width):
    x = tokens(length, width=width)
    mixer = sq.build("fnet", embed_dim=width, dtype=F64)
    close(mixer(x), torch.fft.fft2(x).real)
    close(sq.build("fnet(norm=ortho)", embed_dim=width)(x), torch.fft.fft2(x, norm="ortho").real)
    assert not list(mixer.parameters()) and not mixer.state_dict()


@pytest.mark.parametrize(("length", "width"), [(71, 11), (64, 8)])
def test_fnet_twice_gives_the_sequence_and_its_reverse(length, width):
    x, mixer = tokens(length, width=width), sq.build("fnet", embed_dim=width)
    back = x.flip(1, 2).roll((1, 1), (1, 2))
    close(mixer(mixer(x)), length * width / 2 * (x + back))


def test_fnet_is_its_own_transpose():
    mixer = sq.build("fnet", embed_dim=11)
    x, y = tokens(71, seed=1), tokens(71, seed=2)
    close((mixer(x) * y).sum(), (x * mixer(y)).sum())
    mask = torch.rand(2, 71, generator=torch.Generator().manual_seed(3)) > 0.4
    x, y = (t.masked_fill(~mask[..., None], 0) for t in (x, y))
    close((mixer(x, key_mask=mask) * y).sum(), (x * mixer(y, key_mask=mask)).sum())


def test_fnet_ragged_rows_keep_their_precision_at_any_length():
    """Squares of positions are reduced as integers: angles do not lose digits with the length."""
    length, own = 3001, 2999  # primes
    x = tokens(length, batch=1, width=3)
    mask = (torch.arange(length) < own)[None]
    mixer = sq.build("fnet", embed_dim=3)
    wanted = torch.fft.fft2(x[:, :own]).real
    close(mixer(x, key_mask=mask)[:, :own], wanted)
    # float32: three transforms of 6002 places, log2 of it is 13 roundings each, relative to the
    # root mean square of the output, of which the largest is some four times
    found = mixer(x.float(), key_mask=mask)[:, :own].double()
    assert (found - wanted).square().mean().sqrt() <= 40 * 6e-8 * wanted.square().mean().sqrt()


def test_fnet_with_zeros_has_the_frequencies_of_the_padded_length():
    x, mixer = tokens(71), sq.build("fnet(padding=zero)", embed_dim=11)
    mask = (torch.arange(71) < 53).expand(2, -1)
    padded = torch.nn.functional.pad(x[:, :53], (0, 0, 0, 18))
    close(mixer(x, key_mask=mask)[:, :53], torch.fft.fft2(padded).real[:, :53])
    reason = sq.describe("fnet(padding=zero)").capabilities.pad_invariant.reason
    assert "padding=compact" in reason
    assert (mixer(x, key_mask=mask)[:, :53] - mixer(x[:, :53])).abs().max() > 1.0


def test_fnet_in_half_precision_overflows_only_without_ortho():
    x = torch.full((1, 4096, 32), 2.0, dtype=torch.float16)  # one number is their sum, 2^18
    assert sq.build("fnet", embed_dim=32)(x).isinf().any()
    assert sq.build("fnet(norm=ortho)", embed_dim=32)(x).isfinite().all()


# ---- gmlp ------------------------------------------------------------------------------------


def test_gmlp_without_spatial_weights_is_a_feed_forward_network():
    mixer = sq.build("gmlp", embed_dim=11, max_length=71, dtype=F64)
    with torch.no_grad():
        mixer.spatial_weight.zero_()
    x = tokens(71)
    carried = torch.nn.functional.gelu(x @ mixer.in_weight.T)[..., :11]
    close(mixer(x), carried @ mixer.out_weight.T)


def test_gmlp_starts_near_that():
    """W is within ±10^-3/n: over n gates of size ≤ √(E/2) it moves b = 1 by 10^-3·√(E/2)."""
    mixer = sq.build("gmlp(hidden=50)", embed_dim=11, max_length=83, dtype=F64)
    assert mixer.spatial_weight.abs().max() <= 1e-3 / 83
    assert mixer.spatial_weight.std().item() == pytest.approx(1e-3 / 83 / 3**0.5, rel=0.05)
    assert (mixer.spatial_bias == 1).all() and not mixer.in_bias.any()
    _, gates = mixer._gates(tokens(83), None)
    assert (mixer._spatial(gates, 83, False) - 1).abs().max() <= 1e-3 * 25**0.5


def test_gmlp_toeplitz_equals_full_weights_of_that_form():
    toeplitz = make_mixer("gmlp(weights=toeplitz, heads=11)")
    full = make_mixer("gmlp(heads=11)")
    place = torch.arange(83)
    state = toeplitz.state_dict()
    state["spatial_weight"] = state["spatial_weight"][:, place[:, None] - place + 82]
    full.load_state_dict(state)
    for length in (1, 2, 71, 83):
        for causal in (False, True):
            close(toeplitz(tokens(length), causal=causal), full(tokens(length), causal=causal))


def test_gmlp_toeplitz_shifts_with_its_input():
    """With one bias for all positions the causal unit does the same everywhere."""
    mixer = make_mixer("gmlp(weights=toeplitz)")
    with torch.no_grad():
        mixer.spatial_bias.fill_(0.7)
    x = tokens(71)
    mask = (torch.arange(83) >= 12).expand(2, -1)
    late = torch.cat([torch.zeros(2, 12, 11, dtype=F64), x], 1)
    close(mixer(late, causal=True, key_mask=mask)[:, 12:], mixer(x, causal=True))


def test_gmlp_long_continuations_are_convolved_and_short_ones_written_out():
    """Both ways of `_spatial` give the rows of one call, on either side of the bound."""
    from subquad.attention.mixer.gmlp import DENSE_ROWS

    mixer = make_mixer("gmlp(weights=toeplitz)", most=200)
    x = tokens(200)
    whole = mixer(x, causal=True)
    for rows in (DENSE_ROWS, DENSE_ROWS + 1):
        _, state = mixer.prefill(x[:, : 200 - rows])
        close(mixer.step(x[:, 200 - rows :], state=state)[0], whole[:, 200 - rows :])


def test_gmlp_parameters():
    def count(spec):
        mixer = sq.build(spec, embed_dim=12, max_length=83)
        return sum(p.numel() for p in mixer.parameters())

    channels = 12 * 24 + 24 + 2 * 12 + 12 * 12 + 12
    assert count("gmlp") == channels + 83 * 83 + 83
    assert count("gmlp(weights=toeplitz, heads=3)") == channels + 3 * (165 + 83)
    assert count("gmlp(attention=5)") == count("gmlp") + 15 * 12 + 5 * 12 + 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("hidden=7", "hidden=7 must be even"),
        ("hidden=0", "hidden=0 must be an integer ≥ 2"),
        ("weights=circulant", "weights='circulant'"),
        ("heads=0", "heads=0 must be an integer ≥ 1"),
        ("attention=0", "attention=0 must be an integer ≥ 1"),
        ("heads=5", "heads=5 must divide hidden/2 = 11"),
    ],
)
def test_gmlp_options(options, message):
    with pytest.raises(sq.OptionError, match=message):
        sq.build(f"gmlp({options})", embed_dim=11, max_length=7)


# ---- mlp_mixer -------------------------------------------------------------------------------


def test_mlp_mixer_treats_channels_alike():
    mixer = make_mixer("mlp_mixer(hidden=17)")
    x = tokens(71)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(4))
    close(mixer(x[..., order]), mixer(x)[..., order])


def test_mlp_mixer_has_a_causal_form_with_a_unit_for_each_position_alone():
    have = sq.describe("mlp_mixer").capabilities
    assert "hidden=none" in have.causal.reason and "hidden=none" in have.state.reason
    square = sq.describe("mlp_mixer(hidden=none)")
    assert square.capabilities.causal is True and square.capabilities.state == "growing"
    assert square.flops(2048) == 4 * square.flops(1024)
    assert sq.describe("mlp_mixer").flops(2048) == 2 * sq.describe("mlp_mixer").flops(1024)
    with pytest.raises(sq.OptionError, match="hidden=0 must be an integer ≥ 1"):
        sq.build("mlp_mixer(hidden=0)", embed_dim=11, max_length=7)


# ---- all -------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", mixer_variants())
def test_influence_is_the_norm_of_the_jacobian(spec):
    mixer, x = make_mixer(spec, width=11), tokens(5)[0]
    for causal in {False, bool(mixer.capabilities.causal)}:
        found = mixer.influence(x, causal=causal)
        eps = 1e-6
        for j in (0, 4):
            columns = []
            for d in range(11):
                step = torch.zeros_like(x)
                step[j, d] = eps
                up, down = mixer(x + step, causal=causal), mixer(x - step, causal=causal)
                columns.append((up - down) / (2 * eps))
            wanted = torch.stack(columns).square().sum((0, 2)).sqrt()
            # central differences: third derivatives of order one, eps² = 1e-12, and rounding
            # of values up to 50, 50·1.1e-16/eps = 5e-9 in each of 121 entries
            assert (found[:, j] - wanted).abs().max() < 1e-7 * max(1, wanted.max())
        if causal:
            assert found.triu(1).max() < 1e-12 * found.max()  # a Fourier transform rounds
    with pytest.raises(sq.ShapeError, match=r"x must be \(L, C=11\), given \(1, 5, 11\)"):
        mixer.influence(x[None])


def test_states_hold_what_they_say():
    """Bytes a token and row: E/2 gates, the attention's key and value; tokens and units."""
    for spec, numbers in (("gmlp(hidden=12, attention=5)", 6 + 10), ("mlp_mixer(hidden=none)", 22)):
        _, state = make_mixer(spec).prefill(tokens(19))
        assert state.nbytes == 2 * 19 * numbers * 8


def test_learned_mixers_learn_to_copy_from_a_place():
    """What learned weights over positions can do by themselves; FNet has none."""
    torch.manual_seed(0)
    x = torch.randn(64, 12, 4)
    wanted = x.roll(2, 1)
    for spec in ("gmlp", "gmlp(weights=toeplitz)", "mlp_mixer(hidden=12)"):
        mixer = sq.build(spec, embed_dim=4, max_length=12)
        optimiser = torch.optim.Adam(mixer.parameters(), lr=2e-2)
        first = torch.nn.functional.mse_loss(mixer(x), wanted).item()
        for _ in range(150):
            optimiser.zero_grad()
            loss = torch.nn.functional.mse_loss(mixer(x), wanted)
            loss.backward()
            optimiser.step()
        # predicting zero costs 1; half of that cannot be had without reading the right place
        assert first > 0.9 and loss.item() < 0.5, (spec, first, loss.item())


# ---- states that do not fit ------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["gmlp", "gmlp(attention=5)", "mlp_mixer(hidden=none)"])
def test_states_of_other_sizes_and_dtypes_are_refused(spec):
    mixer = sq.build(spec, embed_dim=11, max_length=71, dtype=F64)
    x = tokens(5)
    _, state = mixer.prefill(x)
    with pytest.raises(sq.ShapeError, match="state must be a .*State, given Tensor"):
        mixer.step(x[:, :1], state=torch.zeros(2))
    wide = sq.build(spec, embed_dim=13, max_length=71, dtype=F64)
    with pytest.raises(sq.ShapeError, match="the state holds 11 channels, these tokens have 13"):
        wide.step(tokens(1, width=13), state=state)
    with pytest.raises(sq.DtypeError, match=r"the state is torch\.float64, .* torch\.float32"):
        mixer.float().step(x[:, :1].float(), state=state)


def test_gmlp_states_with_and_without_attention_are_not_the_same():
    """Without the check, attention would begin anew behind the state's tokens."""
    plain, attentive = make_mixer("gmlp"), make_mixer("gmlp(attention=5)")
    x = tokens(7)
    with pytest.raises(sq.ShapeError, match="gmlp has an attention .*, the state has none"):
        attentive.step(x[:, :1], state=plain.prefill(x)[1])
    with pytest.raises(sq.ShapeError, match="the state has an attention .*, gmlp has none"):
        plain.step(x[:, :1], state=attentive.prefill(x)[1])
