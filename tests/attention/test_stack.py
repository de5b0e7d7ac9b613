"""Stacks beside torch's, a naive RealFormer, their own blocks by hand, and themselves in chunks."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import subquad as sq
from subquad.attention.feedforward import FeedForward

N, H, C, L, S, HIDDEN = 2, 3, 12, 7, 11, 13
D = C // H
EPS = torch.finfo(torch.float64).eps
# A layer's rounding, forward and backward, is derived in test_layers.py: 12 and 76 eps of the
# largest entry for two implementations. Errors of layers add, and each is passed on by norms
# that rescale it by no more than they rescale the tokens.
FORWARD, BACKWARD = 12, 76
PERFORMER = "performer(features=8)"


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def tokens(length=L, seed=0, rows=N):
    return torch.randn(rows, length, C, generator=generator(seed), dtype=torch.float64)


def kept(length=L, rows=N):
    """True = attend; the last row ends three tokens early."""
    return torch.arange(length) < torch.tensor([[length]] * (rows - 1) + [[length - 3]])


def shuffled(module, seed=1):
    """The module with parameters that are neither zero nor one."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.5, 0.5, generator=generator(seed))
            if parameter.dim() == 1:
                parameter.add_(0.7)
    return module


def encoder(pattern="afaf", kind=sq.TransformerEncoder, **options):
    options = {"dropout": 0.0, "dtype": torch.float64, "mechanism": "softmax", **options}
    return shuffled(kind(C, H, dim_feedforward=HIDDEN, pattern=pattern, **options))


def decoder(pattern="acfacf", **options):
    return encoder(pattern, sq.TransformerDecoder, **options)


def close(got, wanted, bound, what="", scale=None):
    assert got.shape == wanted.shape, what
    scale = wanted.abs().max().clamp_min(1e-3).item() if scale is None else scale
    error = (got - wanted).abs().max().item() / scale
    assert error <= bound * EPS, f"{what}: {error / EPS:.1f} eps > {bound} eps"


def gradients(module, out, inputs):
    direction = torch.randn(out.shape, generator=generator(9), dtype=out.dtype)
    named = dict(module.named_parameters())
    found = torch.autograd.grad(out, [*inputs, *named.values()], direction)
    return dict(zip([*range(len(inputs)), *named], found, strict=True))


# ---- torch's stacks ------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_the_usual_pattern_is_torchs_stack(norm_first, activation):
    """Forward and every gradient, encoder and decoder, with causal masks and padding."""
    options = {"dropout": 0.0, "activation": activation, "batch_first": True, "bias": True}
    options |= {"norm_first": norm_first, "dim_feedforward": HIDDEN}
    theirs = nn.Transformer(
        C, H, batch_first=True,
        custom_encoder=nn.TransformerEncoder(
            nn.TransformerEncoderLayer(C, H, **options), 3, nn.LayerNorm(C),
            enable_nested_tensor=False,
        ),
        custom_decoder=nn.TransformerDecoder(
            nn.TransformerDecoderLayer(C, H, **options), 2, nn.LayerNorm(C)
        ),
    )  # fmt: skip
    theirs = shuffled(theirs.double())
    shared = {
        "activation": activation,
        "dropout": 0.0,
        "mechanism": "softmax",
        "norm_first": norm_first,
        "final_norm": True,
        "dtype": torch.float64,
    }
    ours = nn.ModuleDict(
        {
            "encoder": sq.TransformerEncoder(C, H, 3, HIDDEN, **shared),
            "decoder": sq.TransformerDecoder(C, H, 2, HIDDEN, **shared),
        }
    )
    for name, stack in ours.items():
        stack.load_torch(theirs.state_dict(), prefix=f"{name}.")
    src, tgt = tokens(S).requires_grad_(), tokens(L, 1).requires_grad_()
    keep, tgt_keep = kept(S), kept(L)
    triangle = torch.ones(L, L, dtype=torch.bool).triu(1)
    wanted = theirs(
        src, tgt, tgt_mask=triangle, src_key_padding_mask=~keep,
        memory_key_padding_mask=~keep, tgt_key_padding_mask=~tgt_keep,
    )  # fmt: skip
    memory = ours["encoder"](src, key_mask=keep)
    got = ours["decoder"](tgt, memory, key_mask=tgt_keep, memory_key_mask=keep)
    close(got, wanted, 5 * FORWARD, "output")  # three layers, and two behind them
    truth = gradients(theirs, wanted, [src, tgt])
    found = gradients(ours, got, [src, tgt])
    # In the order of the blocks both lists of parameters are the same: norms stand elsewhere.
    assert len(found) == len(truth)
    for index in (0, 1):
        close(found[index], truth[index], 5 * BACKWARD, f"input {index}")
    for name, stack in ours.items():
        part = {
            key.removeprefix(f"{name}."): g for key, g in truth.items() if f"{key}".startswith(name)
        }
        own = copy.deepcopy(stack)
        own.load_torch(part)  # gradients travel the way of weights
        # Those of queries and keys are differences of what flows to the values, P∘(dP − Σ P·dP),
        # and may cancel: rounding is relative to the largest of the block.
        blocks: dict[str, float] = {}
        for key, value in own.state_dict().items():
            block = ".".join(key.split(".")[:2])
            blocks[block] = max(blocks.get(block, 1e-3), value.abs().max().item())
        for key, value in own.state_dict().items():
            block = ".".join(key.split(".")[:2])
            what = f"gradient of {name}.{key}"
            close(found[f"{name}.{key}"], value, 5 * BACKWARD, what, blocks[block])


def test_weights_of_another_stack_are_refused():
    layer = nn.TransformerEncoderLayer(C, H, HIDDEN)
    state = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).state_dict()
    stack = sq.TransformerEncoder(C, H, 2, HIDDEN, mechanism=PERFORMER)
    own = stack.blocks[0].attention.mechanism.state_dict()
    stack.load_torch(state)
    assert torch.equal(
        stack.blocks[2].attention.in_proj_weight, state["layers.1.self_attn.in_proj_weight"]
    )
    after = stack.blocks[0].attention.mechanism.state_dict()
    assert own and all(torch.equal(own[name], after[name]) for name in own)
    with pytest.raises(sq.OptionError, match="torch's layers are 'af' again and again.*'aaf'"):
        encoder("aaf").load_torch(state)
    with pytest.raises(RuntimeError, match=r"blocks\.2\.attention\.in_proj_weight"):
        sq.TransformerEncoder(C, H, 1, HIDDEN).load_torch(state)


def test_depth_defaults_are_the_papers():
    assert sq.TransformerEncoder(C, H, dim_feedforward=2).pattern == "af" * 6
    assert sq.TransformerDecoder(C, H, 2, 2).pattern == "acfacf"
    assert sq.TransformerEncoder(C, H, 2, 2, pattern="aa f").pattern == "aafaaf"
    assert sq.TransformerEncoder(C, H, 1, 2, norm_first=True).norm is not None
    assert sq.TransformerEncoder(C, H, 1, 2).norm is None


# ---- patterns and mechanisms ---------------------------------------------------------------


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_pattern_is_its_blocks_one_after_the_other(norm_first):
    stack = encoder("aaf fa", norm_first=norm_first, activation="geglu")
    x, keep = tokens(), kept()
    y = x
    for letter, block in zip("aaffa", stack.blocks, strict=True):

        def inner(z, letter=letter, block=block):
            if letter == "f":
                gate, value = block.feed_forward.linear1(z).chunk(2, -1)
                return block.feed_forward.linear2(F.gelu(gate) * value)
            return block.attention(z, z, z, key_padding_mask=~keep)[0]

        y = y + inner(block.norm(y)) if norm_first else block.norm(y + inner(y))
    y = stack.norm(y) if norm_first else y
    close(stack(x, key_mask=keep), y, 5 * FORWARD)
    hidden = stack.hidden_states(x, key_mask=keep)
    assert len(hidden) == 6 and torch.equal(hidden[-1], stack(x, key_mask=keep))
    assert torch.equal(hidden[-2], hidden[-1]) is not norm_first


def test_wrong_letters_are_named_with_their_place():
    with pytest.raises(sq.OptionError, match=r"'x' at place 3 is none of a \(self-attention"):
        sq.TransformerEncoder(C, H, pattern="afx")
    with pytest.raises(sq.OptionError, match="'c' at place 4.*needs a TransformerDecoder"):
        sq.TransformerEncoder(C, H, pattern="af cf")
    with pytest.raises(sq.OptionError, match="pattern='  ' must be letters, as in 'a c f'"):
        sq.TransformerDecoder(C, H, pattern="  ")


def test_a_mechanism_for_each_attention():
    given = {
        "all": ("local(window=2)", ["local", "local", "local"]),
        "list": (["softmax", PERFORMER, "linear"], ["softmax", "performer", "linear"]),
        "mapping": (
            {"default": "linear", -1: "softmax", "0": "local"}, ["local", "linear", "softmax"]
        ),
        "heads": ("mixed(local*2, softmax)", ["mixed"] * 3),
    }  # fmt: skip
    for what, (mechanism, wanted) in given.items():
        stack = encoder("afafa", mechanism=mechanism)
        attentions = [block.attention for block in stack.blocks if hasattr(block, "attention")]
        assert [one.mechanism.name for one in attentions] == wanted, what
        assert stack(tokens()).isfinite().all()
    both = decoder("acf", mechanism="softmax", cross_mechanism=PERFORMER)
    assert [b.attention.mechanism.name for b in both.blocks[:2]] == ["softmax", "performer"]


def test_no_two_attentions_draw_the_same_features():
    """Nor do their parts, which count up from an attention's seed."""
    heads = f"mixed({PERFORMER}*2, {PERFORMER})"
    stack = decoder("acfaf", mechanism=[heads, PERFORMER], cross_mechanism=PERFORMER, seed=5)
    draws = [t for name, t in stack.named_buffers() if name.endswith("projection")]
    rows = [row for t in draws for row in t.flatten(0, -2).tolist()]
    # eight features for each of three heads, in three attentions
    assert len({tuple(row) for row in rows}) == len(rows) == 3 * 3 * 8


def test_wrong_mechanisms_say_what_is_wrong():
    cases = {
        "mechanism has 1 entries, the pattern has 'a' 2 times": ["softmax"],
        r"attentions \[1\] have none": {0: "softmax"},
        '7 must be "default" or a number from -2 to 1': {"default": "softmax", 7: "softmax"},
        '1.5 must be "default" or a number': {"default": "softmax", 1.5: "linear"},
        "-2 and 0 are one attention": {0: "softmax", -2: "linear", 1: "softmax"},
        "unknown mechanism 'sotfmax'": "sotfmax",
    }
    for match, mechanism in cases.items():
        with pytest.raises(sq.OptionError, match=match):
            sq.TransformerEncoder(C, H, 2, mechanism=mechanism)
    with pytest.raises(sq.OptionError, match="cross_mechanism is needed"):
        sq.TransformerDecoder(C, H, 2, mechanism=["softmax", "softmax"])
    with pytest.raises(sq.OptionError, match="fnet mixes the tokens of one sequence"):
        sq.TransformerDecoder(C, H, 1, mechanism="softmax", cross_mechanism="fnet")
    with pytest.raises(sq.UnsupportedError, match="'performer' does not support attention_noise"):
        sq.TransformerEncoder(C, H, 1, attention_noise=0.1)
    with pytest.raises(sq.UnsupportedError, match="'fnet' does not support dropout=0.1"):
        sq.TransformerEncoder(C, H, 1, mechanism="fnet", attention_dropout=0.1)


def test_token_mixers_stand_where_attention_stands():
    mechanism = ["fnet", "softmax", "gmlp"]
    stack = encoder("afafaf", mechanism=mechanism, max_length=L, positions="sinusoidal")
    x, keep = tokens(), kept()
    out = stack(x, key_mask=keep)
    assert stack.blocks[0].attention.mechanism.name == "fnet"
    spoiled = x.masked_fill(~keep[..., None], 7.0)
    close(stack(spoiled, key_mask=keep)[keep], out[keep], 6 * FORWARD, "padding")
    assert (stack(x)[keep] - out[keep]).abs().max() > 1e-3
    with pytest.raises(sq.UnsupportedError, match="'fnet' does not support causal"):
        stack(x, causal=True)
    stack = encoder("afaf", mechanism=["gmlp", "softmax"], max_length=L)
    first, state = stack.prefill(x[:, :4])
    rest, state = stack.step(x[:, 4:], state)
    close(torch.cat([first, rest], 1), stack(x, causal=True), 4 * FORWARD, "streamed")


def test_activations_by_name():
    x = tokens()
    plain = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}
    gates = {"glu": torch.sigmoid, "reglu": F.relu, "geglu": F.gelu, "swiglu": F.silu}
    for name in [*plain, *gates]:
        network = shuffled(FeedForward(C, HIDDEN, name, dtype=torch.float64))
        units = x @ network.linear1.weight.T + network.linear1.bias
        if name in gates:
            units = gates[name](units[..., :HIDDEN]) * units[..., HIDDEN:]
        else:
            units = plain[name](units)
        # two sums of at most 13 terms, in another order: see test_layers.py
        close(network(x), units @ network.linear2.weight.T + network.linear2.bias, FORWARD, name)
    with pytest.raises(sq.OptionError, match=r"activation='swigl' is none of .*'swiglu'"):
        FeedForward(C, HIDDEN, "swigl")


# ---- residual attention --------------------------------------------------------------------


def heads(projected):
    return projected.unflatten(-1, (-1, D)).transpose(1, 2)


def explicit(attn, query, memory, allowed, before, last):
    """One RealFormer attention with L×S scores; appends its own to `before`."""
    q, k, v = attn._project(query, memory, memory, False)
    q, k, v = heads(q), heads(k), heads(v)
    own = q @ k.transpose(-1, -2) / math.sqrt(D)
    before.append(own)
    scores = sum(before[-1 - last :])
    weights = scores.masked_fill(~allowed, -math.inf).softmax(-1)
    return attn.out_proj((weights @ v).transpose(1, 2).flatten(2))


def real_former(stack, x, last, keep, causal, memory=None, memory_keep=None):
    allowed = keep[:, None, None, :].expand(-1, 1, x.shape[1], -1)
    if causal:
        allowed = allowed & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    before = {"a": [], "c": []}
    for letter, block in zip(stack.pattern, stack.blocks, strict=True):
        if letter == "f":
            out = block.feed_forward(x)
        elif letter == "a":
            out = explicit(block.attention, x, x, allowed, before["a"], last)
        else:
            seen = memory_keep[:, None, None, :]
            out = explicit(block.attention, x, memory, seen, before["c"], last)
        x = block.norm(x + out)
    return x


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("last", [True, 1, 2])
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_residual_attention_is_realformers(kind, last, causal):
    """He et al. 2020, section 3.2: s_l = q_l·k_l/√D + s_{l−1}, for each kind of attention."""
    layers, count = 4, (4 if last is True else last)
    make, letters = (encoder, "af") if kind == "encoder" else (decoder, "acf")
    stack = make(letters * layers, residual_attention=last)
    x, memory = tokens().requires_grad_(), tokens(S, 1).requires_grad_()
    keep, memory_keep = kept(), kept(S)
    if kind == "encoder":
        inputs = [x]
        got = stack(x, causal=causal, key_mask=keep)
        wanted = real_former(stack, x, count, keep, causal)
    else:
        inputs = [x, memory]
        got = stack(x, memory, causal=causal, key_mask=keep, memory_key_mask=memory_keep)
        wanted = real_former(stack, x, count, keep, causal, memory, memory_keep)
    # a layer's bound, with logits of up to four summands: errors of each add
    close(got, wanted, layers * 4 * FORWARD, "output")
    found, truth = gradients(stack, got, inputs), gradients(stack, wanted, inputs)
    for name in truth:
        if f"{name}".endswith("in_proj_bias"):
            # softmax forgets what is added to all keys: the middle third has gradient zero, up
            # to roundings of its own sums
            found[name], truth[name] = (
                torch.cat([g[:C], g[2 * C :]]) for g in (found[name], truth[name])
            )
        close(found[name], truth[name], layers * 4 * BACKWARD, f"gradient of {name}")
    plain = make(letters * layers)
    plain.load_state_dict(stack.state_dict())
    arguments = {"causal": causal} if kind == "encoder" else {"memory": memory, "causal": causal}
    assert not torch.allclose(plain(x, **arguments), stack(x, **arguments), rtol=0, atol=1e-5)


def test_residual_attention_in_other_mechanisms():
    """A window over everything is softmax; heads are as wide as the scores that they sum."""
    exact = encoder("afafaf", residual_attention=True)
    near = encoder("afafaf", residual_attention=True, mechanism=f"local(window={L})")
    x, keep = tokens(), kept()
    for causal in (False, True):
        close(
            near(x, key_mask=keep, causal=causal)[keep],
            exact(x, key_mask=keep, causal=causal)[keep],
            3 * 4 * FORWARD,
            "local",
        )
    widths = [block.attention.mechanism.head_dim for block in near.blocks[::2]]
    assert widths == [D, 2 * D, 3 * D]
    short = encoder("afafaf", residual_attention=True, mechanism="compressed(stride=1)")
    assert short(x).isfinite().all()  # its summaries are learned for keys and values apart
    one = encoder("afafaf", residual_attention=1, mechanism="mixed(softmax*2, performer)")
    assert [b.attention.mechanism.head_dim for b in one.blocks[::2]] == [D, 2 * D, 2 * D]
    assert one(x).isfinite().all()
    # a mixer in between has no scores: it is passed over
    skipped = encoder("afafaf", residual_attention=True, mechanism=["softmax", "fnet", "softmax"])
    assert [skipped.blocks[i].attention.mechanism.head_dim for i in (0, 4)] == [D, 2 * D]


def test_residual_performer_estimates_the_residual_scores():
    """The estimate converges to RealFormer's weights as features grow: error ∝ M^-½."""
    exact = encoder("aa", residual_attention=True)
    small = {name: t / 3 for name, t in exact.state_dict().items() if "proj" in name}
    exact.load_state_dict(small, strict=False)
    wanted, squares = exact(tokens()), {16: 0.0, 1024: 0.0}
    for features in squares:
        for seed in range(8):
            mechanism = f"performer(features={features})"
            stack = encoder("aa", residual_attention=True, mechanism=mechanism, seed=seed)
            stack.load_state_dict(small, strict=False)
            squares[features] += (stack(tokens()) - wanted).square().sum().item()
    # 64 times the features, a 64th of the mean square; the mean of eight draws, each of which
    # varies by about its size, is within a factor of 2 (two deviations), both above and below
    assert squares[1024] < squares[16] / 16, squares


@pytest.mark.parametrize(
    ("mechanism", "reason"),
    [
        ("linear", "no function of scale"),
        ("additive", "no function of scale"),
        ("mixed(softmax, linear)", "the weights of linear"),
        ("aft", "no function of scale"),
        ("reformer", "no function of scale"),
    ],
)
def test_scores_that_do_not_add_are_refused(mechanism, reason):
    with pytest.raises(sq.UnsupportedError, match=f"residual_attention.*{reason}"):
        encoder("afaf", residual_attention=True, mechanism=mechanism, max_length=L)


# ---- norms ---------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("norm", ["layer", "rms", "batch"])
def test_norms_leave_padding_out(norm, norm_first):
    """A padded batch trains like its tokens alone: with batch norm the statistics need it."""
    stack = encoder("afaf", norm=norm, norm_first=norm_first)
    other = copy.deepcopy(stack)
    kind = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "batch": nn.BatchNorm1d}[norm]
    assert all(isinstance(block.norm, kind) for block in stack.blocks)
    x, keep = tokens(rows=1), torch.arange(L + 3)[None] < L
    padded = F.pad(x, (0, 0, 0, 3), value=5.0)
    got = stack(padded, key_mask=keep)[:, :L]
    wanted = other(x)
    close(got, wanted, 4 * FORWARD, "training")
    found, truth = gradients(stack, got, []), gradients(other, wanted, [])
    # A bias in front of a batch norm has gradient zero, so that errors are measured by the
    # largest gradient of all.
    scale = max(gradient.abs().max().item() for gradient in truth.values())
    for name in truth:
        close(found[name], truth[name], 4 * BACKWARD, name, scale)
    for (name, a), b in zip(stack.named_buffers(), other.buffers(), strict=True):
        close(a.double(), b.double(), FORWARD, name)
    close(stack.eval()(padded, key_mask=keep)[:, :L], other.eval()(x), 4 * FORWARD, "evaluation")


# ---- streaming -----------------------------------------------------------------------------

POSITIONS = [
    ("sinusoidal", "input"),
    ("sinusoidal", "attention"),
    ("learned", "input"),
    ("learned", "attention"),
    ("rotary(base=100)", "input"),
]
STREAMED = ["softmax", PERFORMER, "local(window=3)", "near_far(window=2, sinks=1, far=performer)"]


def chunked(prefill, step, x, split):
    parts, state = [], None
    for piece in x.split(split, 1):
        out, state = prefill(piece) if state is None else step(piece, state)
        parts.append(out)
    return torch.cat(parts, 1), state


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("mechanism", STREAMED)
def test_whole_is_chunked(mechanism, residual):
    # near_far sums its parts in an order of its own, and log features multiply what their
    # exponents round by |log φ| ≤ 30: two hundred eps instead of twelve
    bound = 4 * (FORWARD if mechanism == "softmax" else 200)
    memory, keep, x = tokens(S, 3), kept(S), tokens()
    for index, (positions, at) in enumerate([(None, "input"), *POSITIONS]):
        options = {"positions": positions, "positions_at": at, "max_length": 2 * L}
        options |= {"residual_attention": residual, "mechanism": mechanism, "norm_first": True}
        stack = encoder("afa", **options).eval()
        split = [(1,) * L, (4, 1, 2), (2, 5)][index % 3]
        got, state = chunked(stack.prefill, stack.step, x, split)
        close(got, stack(x, causal=True), bound, f"{positions} {at}")
        assert state.length == L
        both = decoder("acfac", cross_mechanism=PERFORMER, **options).eval()

        def start(piece, both=both):
            return both.prefill(piece, memory, memory_key_mask=keep)

        got, state = chunked(start, both.step, x, split)
        close(got, both(x, memory, memory_key_mask=keep), 4 * 200, f"decoder {positions} {at}")


def test_a_state_is_constant_and_its_rows_can_be_chosen():
    stack = decoder(mechanism=PERFORMER, positions="rotary", residual_attention=True).eval()
    memory, x = tokens(S, 3), tokens()
    _, early = stack.prefill(x[:, :1], memory)
    _, late = stack.step(x[:, 1:], early)
    assert late.nbytes == early.nbytes and late.length == L
    _, wide = stack.prefill(x[:, :1], tokens(4 * S, 3))
    assert wide.nbytes == early.nbytes  # nor does it grow with the memory
    out, _ = stack.step(x[:, 1:], early)
    rows = early.repeat(2).select([3, 0])
    chosen, _ = stack.step(x[[1, 0], 1:], rows)
    close(chosen, out[[1, 0]], FORWARD)
    kept_keys = decoder(mechanism=PERFORMER, cross_mechanism="linformer", max_length=S).eval()
    got, _ = chunked(lambda t: kept_keys.prefill(t, memory), kept_keys.step, x, (3, 4))
    close(got, kept_keys(x, memory), 200, "a mechanism without a state: keys and values")


def test_left_padding_with_position_ids():
    """A row padded on the left gives what it gives alone, in one call and in steps."""
    x, pad = tokens(rows=1), 3
    padded = F.pad(x, (0, 0, pad, 0), value=3.0)
    keep = torch.arange(L + pad)[None] >= pad
    ids = sq.positions.position_ids(keep)
    for positions, at in POSITIONS:
        stack = encoder("afaf", positions=positions, positions_at=at, max_length=2 * L).eval()
        wanted = stack(x, causal=True)
        got = stack(padded, causal=True, key_mask=keep, position_ids=ids)[:, pad:]
        close(got, wanted, 4 * FORWARD, f"{positions} {at}")
        first, state = stack.prefill(padded[:, :5], key_mask=keep[:, :5], position_ids=ids[:, :5])
        rest, _ = stack.step(padded[:, 5:], state, position_ids=ids[:, 5:])
        close(torch.cat([first, rest], 1)[:, pad:], wanted, 4 * FORWARD, f"{positions} steps")
        # without them the state counts on, and its rows do when they are repeated
        rest, state = stack.step(padded[:, 5:7].repeat(2, 1, 1), state.repeat(2))
        last, _ = stack.step(padded[:, 7:], state.select([1]))
        joined = torch.cat([first, rest[:1], last], 1)[:, pad:]
        close(joined, wanted, 4 * FORWARD, f"{positions} counted on")
        if not positions.startswith("rotary"):  # rotations know distances alone
            shifted = stack(padded, causal=True, key_mask=keep)[:, pad:]
            assert not torch.allclose(shifted, wanted, atol=1e-4)


def test_ragged_prompts_padded_on_the_right_go_on():
    """After `position_ids` of the prompts each row goes on from its own last token."""
    x, keep = tokens(), kept()
    more = tokens(2, 4)
    ids = sq.positions.position_ids(keep)
    for positions, at in POSITIONS:
        stack = encoder("afaf", positions=positions, positions_at=at, max_length=2 * L).eval()
        _, state = stack.prefill(x, key_mask=keep, position_ids=ids)
        got, _ = stack.step(more, state)
        for row, length in enumerate((L, L - 3)):
            alone = torch.cat([x[row, :length], more[row]])[None]
            close(got[row], stack(alone, causal=True)[0, length:], 4 * FORWARD, f"{positions}")


# ---- positions -----------------------------------------------------------------------------


def test_positions_at_the_input_and_at_the_attention():
    x, memory = tokens(), tokens(S, 1)
    table = sq.positions.Sinusoidal(C, frequencies=[2 ** (1 / n) for n in (4, 3, 2, 1)])
    p, at = table(torch.arange(L), torch.float64), table(torch.arange(S), torch.float64)
    plain = decoder("ac")
    summed = decoder("ac", positions=table)
    close(summed(x, memory), plain(x + p, memory), FORWARD, "input")
    close(encoder("a", positions=table)(x), encoder("a")(x + p), FORWARD, "input, encoder")
    stack = decoder("ac", positions=table, positions_at="attention")
    own, cross = stack.blocks
    triangle = torch.ones(L, L, dtype=torch.bool).triu(1)
    y = own.norm(x + own.attention(x + p, x + p, x, attn_mask=triangle)[0])
    y = cross.norm(y + cross.attention(y + p, memory + at, memory)[0])
    close(stack(x, memory), y, 2 * FORWARD, "attention")


def test_rotations_know_distances_alone():
    x = tokens()
    for mechanism in ("softmax", "linear"):
        stack = encoder("afaf", positions="rotary", mechanism=mechanism)
        later = stack(x, position_ids=torch.arange(L) + 10**6)
        if mechanism == "softmax":
            # the angle of 10⁶ radians is rounded to 10⁶ eps/2 in float64, twice, in two layers
            close(later, stack(x), 4 * 10**6, "shifted by a million tokens")
        assert (stack(x) - encoder("afaf", mechanism=mechanism)(x)).abs().max() > 1e-3
        spread = stack(x, position_ids=2 * torch.arange(L))
        assert not torch.allclose(spread, stack(x), atol=1e-3)


def test_wrong_positions_say_what_is_wrong():
    for positions, match in {
        "sinusodial": "none of sinusoidal, learned, rotary.*'sinusoidal'",
        "rotary(bases=3)": "unknown option 'bases'.*'base'",
        "learned": "positions=learned needs max_length",
    }.items():
        with pytest.raises(sq.OptionError, match=match):
            encoder(positions=positions)
    with pytest.raises(sq.OptionError, match="positions have 8 channels, d_model is 12"):
        encoder(positions=sq.positions.Sinusoidal(8))
    with pytest.raises(sq.OptionError, match=r"heads of 6 channels, the stack's have 4"):
        encoder(positions=sq.positions.Rotary(6))
    with pytest.raises(sq.OptionError, match="positions_at='inputs' is none of"):
        encoder(positions_at="inputs")
    with pytest.raises(sq.OptionError, match="position_ids are given to a stack without"):
        encoder()(tokens(), position_ids=torch.arange(L))
    stack = encoder(positions="learned", max_length=L - 1)
    with pytest.raises(sq.ShapeError, match=r"end at max_length=6, given 7 tokens"):
        stack(tokens())
    with pytest.raises(sq.ShapeError, match=r"position_ids must be \(L,\) = \(7,\) or \(B, L\)"):
        encoder(positions="rotary")(tokens(), position_ids=torch.arange(3))


# ---- memories ------------------------------------------------------------------------------


def test_a_memory_for_each_cross_attention():
    """Decoder layers may read the encoder layer of their depth, or any other."""
    source, stack = encoder("afaf"), decoder("acfacf")
    x, src, keep = tokens(), tokens(S, 1), kept(S)
    hidden = source.hidden_states(src, key_mask=keep)
    layers = [hidden[1], hidden[3]]
    got = stack(x, layers, memory_key_mask=keep)
    halves = [decoder("acf"), decoder("acf")]
    for index, half in enumerate(halves):
        own = {
            name.replace(f"blocks.{3 * index + i}.", f"blocks.{i}."): tensor
            for name, tensor in stack.state_dict().items()
            for i in range(3)
            if name.startswith(f"blocks.{3 * index + i}.")
        }
        half.load_state_dict(own)
    y = halves[0](x, layers[0], memory_key_mask=keep)
    close(got, halves[1](y, layers[1], memory_key_mask=keep), 2 * FORWARD)
    assert not torch.allclose(got, stack(x, layers[::-1], memory_key_mask=keep), atol=1e-3)
    streamed, _ = chunked(
        lambda t: stack.prefill(t, layers, memory_key_mask=keep), stack.step, x, (2, 5)
    )
    close(streamed, got, 4 * FORWARD, "streamed")
    spoiled = [one.masked_fill(~keep[..., None], math.nan) for one in layers]
    assert torch.equal(stack(x, spoiled, memory_key_mask=keep), got)


def test_a_memory_of_another_width():
    stack = decoder("acf", memory_dim=5, num_kv_heads=1)
    memory = torch.randn(N, S, 5, generator=generator(), dtype=torch.float64)
    got, _ = chunked(lambda t: stack.prefill(t, memory), stack.step, tokens(), (3, 4))
    close(got, stack(tokens(), memory), 2 * FORWARD)


def test_wrong_calls_say_what_is_wrong():
    stack, x, memory = decoder(), tokens(), tokens(S)
    _, state = stack.prefill(x, memory)
    with pytest.raises(sq.ShapeError, match="one for each of 2 cross-attentions, given 3"):
        stack(x, [memory] * 3)
    with pytest.raises(sq.ShapeError, match=r"memory\[1\] must be \(B=2, S, C=12\)"):
        stack(x, [memory, memory[:, 1:]])
    with pytest.raises(sq.ShapeError, match=r"x must be \(B, L, C=12\), given \(2, 7, 11\)"):
        stack(x[..., 1:], memory)
    for call in (lambda: stack(x.float(), memory), lambda: stack(x, memory.long())):
        with pytest.raises(sq.DtypeError, match=r"must have the stack's torch.float64, given"):
            call()
    with pytest.raises(sq.DeviceError, match="memory is on meta, the stack is on cpu"):
        stack(x, memory.to("meta"))
    with pytest.raises(sq.ShapeError, match=r"memory_key_mask must broadcast to .* \(2, 11\), giv"):
        stack(x, memory, memory_key_mask=kept(S - 1))
    for norm in ("layer", "batch"):
        for keep in (kept(L - 1), kept()[None], kept(rows=3)):
            with pytest.raises(sq.ShapeError, match=r"key_mask must broadcast to .* = \(2, 7\)"):
                encoder("f", norm=norm)(x, key_mask=keep)
    with pytest.raises(sq.OptionError, match="a memory at the start, and a state to go on"):
        stack.prefill(x, memory, state=state)
    with pytest.raises(sq.OptionError, match="a memory at the start"):
        stack.prefill(x)
    with pytest.raises(sq.ShapeError, match="state holds 4 attentions, the stack has 2"):
        encoder().step(x, state)
    with pytest.raises(sq.UnsupportedError, match="'linformer' does not support causal"):
        encoder(mechanism="linformer", max_length=L)(x, causal=True)
    with pytest.raises(sq.UnsupportedError, match="'linformer' does not support prefill"):
        encoder(mechanism="linformer", max_length=L).prefill(x)
    with pytest.raises(sq.OptionError, match="norm='bacth' is none of"):
        encoder(norm="bacth")
    with pytest.raises(sq.OptionError, match="nhead=5 must divide d_model=12"):
        sq.TransformerEncoder(C, 5)
    for options in ({"seed": "0"}, {"final_norm": 1}, {"norm_eps": -1.0}, {"memory_dim": 0}):
        with pytest.raises(sq.OptionError, match=f"TransformerDecoder: {next(iter(options))}="):
            sq.TransformerDecoder(C, H, **options)


# These choose, cluster or average by all queries of a call, or by where a query stands.
SEEING = (
    "kernel_nystrom", "nystrom", "sampled", "clustered", "key_clusters", "near_far", "routing",
    "sinkhorn", "local", "strided", "global", "bigbird", "performer(gauge=centre)",
    "mixed(softmax, local)", "strided(reach=none)", "auto",
)  # fmt: skip
LATER = [name for name in sq.mechanisms(cross=True) if name != "mixed"]


MORE = ("performer(gauge=centre)", "mixed(softmax, linformer)", "mixed(softmax, local)")
MORE += ("strided(reach=none)", "mixed(location, softmax)", "location(cumulative=true)")


@pytest.mark.parametrize("cross", [*LATER, *MORE])
def test_no_cross_attention_shows_a_causal_decoder_its_future(cross):
    """Law 2 for the decoder: what a query is told may not depend on the queries behind it."""
    stack = decoder(cross_mechanism=cross, max_length=90).eval()
    x, memory = tokens(20), tokens(90, 3)
    assert stack(x, memory, causal=False).isfinite().all()
    try:
        whole = stack(x, memory)
    except sq.UnsupportedError as error:
        assert "later ones too" in str(error) and "softmax" in error.alternatives
        assert cross in SEEING
        with pytest.raises(sq.UnsupportedError, match="of a causal decoder"):
            stack.prefill(x, memory)
        return
    assert cross not in SEEING
    changed = torch.cat([x[:, :-5], 3 * tokens(5, 8)], 1)
    later = stack(changed, memory)
    close(later[:, :-5], whole[:, :-5], FORWARD, "tokens before a change")
    assert (later[:, -5:] - whole[:, -5:]).abs().max() > 1e-3
    streamed, _ = chunked(lambda piece: stack.prefill(piece, memory), stack.step, x, (3, 1, 16))
    close(streamed, whole, 4 * 200, "streamed")


# ---- weights of the cross-attentions --------------------------------------------------------

RECORDED = [
    "softmax", "additive", PERFORMER, "linear", "near_far(window=2, sinks=1, far=performer)",
    "linformer", "mixed(softmax, performer)", "location(kernel=5)",
    "performer(features=8, redraw=1)",
]  # fmt: skip


MOVING = ["location(kernel=5)", "location(kernel=3, cumulative=true)", "mixed(location, softmax)"]
"""Here a state notes where queries have looked."""


def weights_by_hand(block, x, memory, keep):
    """The weights of a cross-attention as the outputs for one-hot values, key after key."""
    attn = block.attention
    q, k, _ = attn.project(x, memory, memory)
    columns = []
    for j in range(memory.shape[1]):
        v = torch.zeros_like(k[..., :1]).index_fill(2, torch.tensor(j), 1.0)
        columns.append(attn.mechanism(q, k, v.expand_as(k), key_mask=keep, scale=attn.scale))
    return torch.stack([column[..., 0] for column in columns], -1)


@pytest.mark.parametrize("cross", RECORDED)
def test_recorded_weights_are_those_that_are_applied(cross):
    alone = "near_far" not in cross  # who looks at all queries cannot be asked causally
    stack = decoder("acffc", cross_mechanism=cross, max_length=S, positions="sinusoidal").eval()
    x, memory, keep = tokens(), tokens(S, 3).requires_grad_(), kept(S)
    calls = {"memory_key_mask": keep, "causal": alone}
    record = ["what was there stays"]
    out = stack(x, memory, record=record, **calls)
    assert torch.equal(out, stack(x, memory, **calls)), "looking changes nothing"
    assert record.pop(0) == "what was there stays" and len(record) == 2
    hidden = stack.hidden_states(x, memory, **calls, record=(again := []))
    assert torch.equal(hidden[-1], out) and all(map(torch.equal, again, record))
    closed = memory.masked_fill(~keep[..., None], 0)
    for weights, block, at in zip(record, (stack.blocks[1], stack.blocks[4]), (0, 3), strict=True):
        assert weights.shape == (N, H, L, S)
        wanted = weights_by_hand(block, hidden[at], closed, keep)
        # features' exponents round by |log φ| ≤ 30, see test_whole_is_chunked
        close(weights, wanted, 200)
        assert not weights[~keep[:, None, None].expand_as(weights)].any(), "closed where masked"
        if cross != "linformer":  # its values are projected by numbers that sum to anything
            close(weights.sum(-1), torch.ones(N, H, L, dtype=torch.float64), 200)
    # gradients of both losses reach the memory through q and k
    found = torch.autograd.grad(record[1].square().sum(), memory)[0]
    assert found[keep].abs().sum(-1).min() > 0 and not found[~keep].any()


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    "cross", ["softmax", "additive", PERFORMER, "linear", "linformer", *MOVING]
)
def test_weights_are_recorded_step_by_step(cross, residual):
    if residual and cross in ("additive", "linear", *MOVING):
        pytest.skip("their scores do not add")
    options = {"cross_mechanism": cross, "residual_attention": residual, "max_length": S}
    stack = decoder("acfacf", **options).eval()
    x, memory, keep = tokens(), tokens(S, 3), kept(S)
    whole = []
    wanted = stack(x, memory, memory_key_mask=keep, record=whole)
    plain, bare = stack.prefill(x[:, :3], memory, memory_key_mask=keep)
    first = []
    out, state = stack.prefill(x[:, :3], memory, memory_key_mask=keep, record=first)
    assert torch.equal(out, plain)
    turned = state.repeat(2).select([3, 1])  # rows 1 and 0
    rest, _ = stack.step(x[[1, 0], 3:], turned, record=(second := []))
    close(torch.cat([out, rest[[1, 0]]], 1), wanted, 4 * 200)
    for one, two, together in zip(first, second, whole, strict=True):
        close(torch.cat([one, two[[1, 0]]], 2), together, 4 * 200)
    if cross in (PERFORMER, "linear"):
        assert bare.nbytes < state.nbytes, "keys are kept for those who ask alone"
        with pytest.raises(sq.OptionError, match="has forgotten the memory's keys"):
            stack.step(x[:, 3:], bare, record=[])


def test_a_guided_loss_trains_through_checkpoints_and_dropout():
    """The recorded matrix is free of dropout, and a loss of it may be computed in blocks."""
    options = {"dropout": 0.3, "mechanism": "softmax(dropout=0.4, weight_noise=0.3)"}
    one, memory, x = decoder("acfac", **options), tokens(S, 3), tokens()
    two = copy.deepcopy(one)
    two.gradient_checkpointing = True
    found = []
    for stack in (one, two):
        torch.manual_seed(0)
        out = stack(x, memory, record=(record := []))
        close(record[0].sum(-1), torch.ones(N, H, L, dtype=torch.float64), FORWARD, "rows")
        loss = out.square().sum() + sum((r - 0.1).square().sum() for r in record)
        found.append(gradients(stack, loss, []))
        assert stack.blocks[1].attention.mechanism.training
    for name, gradient in found[0].items():
        close(found[1][name], gradient, FORWARD, name)


def test_weights_that_there_are_not():
    stack, x, memory = decoder("acf", cross_mechanism="aft"), tokens(), tokens(S)
    with pytest.raises(sq.UnsupportedError, match="'aft' does not support weights") as caught:
        stack(x, memory, record=[])
    assert {"softmax", "performer"} <= set(caught.value.alternatives)
    with pytest.raises(sq.OptionError, match="record must be a list to append to, given tuple"):
        stack(x, memory, record=())
    with pytest.raises(sq.OptionError, match="record must be a list"):
        stack.prefill(x, memory, record=True)
    both = decoder("acf", cross_mechanism="mixed(location, performer)")
    both(x, memory, record=[])
    with pytest.raises(sq.UnsupportedError, match="record in prefill and step"):
        both.prefill(x, memory, record=[])
    mech = sq.build("performer", head_dim=4, num_heads=2)
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    state = mech.prefill(q, k, v)[1]
    with pytest.raises(sq.UnsupportedError, match="holds no keys: give them as k"):
        mech.weights(q, state=state)
    with pytest.raises(sq.ShapeError, match="weights takes keys k, or a state"):
        mech.weights(q, k, state=state)
    with pytest.raises(sq.ShapeError, match="weights of a state takes no mask"):
        mech.weights(q, state=state, causal=True)


# ---- feed-forward of 1×1 convolutions -------------------------------------------------------


@pytest.mark.parametrize("activation", ["relu", "geglu"])
def test_convolutions_of_size_one_are_linear_maps(activation):
    linear = decoder("acfacf", activation=activation)
    conv = decoder("acfacf", activation=activation, feed_forward="conv")
    assert isinstance(conv.blocks[2].feed_forward.linear1, nn.Conv1d)
    rows = HIDDEN * (1 + (activation == "geglu"))
    assert conv.blocks[2].feed_forward.linear1.weight.shape == (rows, C, 1)
    conv.load_state_dict(linear.state_dict())
    x, memory = tokens().requires_grad_(), tokens(S, 3)
    wanted, got = linear(x, memory), conv(x, memory)
    close(got, wanted, 2 * FORWARD)
    truth, found = gradients(linear, wanted, [x]), gradients(conv, got, [x])
    for name, gradient in truth.items():
        close(found[name].reshape(gradient.shape), gradient, 2 * BACKWARD, name)
    back = decoder("acfacf", activation=activation)
    back.load_state_dict(conv.state_dict())
    assert all(map(torch.equal, back.state_dict().values(), linear.state_dict().values()))
    network = FeedForward(C, HIDDEN, activation, kind="conv", dtype=torch.float64)
    for shape in ((C,), (5, C), (2, 3, 5, C)):
        assert network(torch.randn(shape, dtype=torch.float64)).shape == shape


def test_torchs_weights_load_into_convolutions():
    layer = nn.TransformerEncoderLayer(C, H, HIDDEN, 0.0, batch_first=True, dtype=torch.float64)
    theirs = shuffled(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    ours = sq.TransformerEncoder(
        C, H, 2, HIDDEN, 0.0, feed_forward="conv", mechanism="softmax", dtype=torch.float64
    )
    ours.load_torch(theirs.state_dict())
    close(ours(tokens()), theirs(tokens()), 2 * FORWARD)
    with pytest.raises(sq.OptionError, match=r"feed_forward='convo' is none of .*'conv'"):
        sq.TransformerEncoder(C, H, 2, HIDDEN, feed_forward="convo")


# ---- torch citizenship ---------------------------------------------------------------------


def test_compiles_whole():
    options = {"mechanism": PERFORMER, "residual_attention": True, "positions": "rotary"}
    stack = decoder("aacf", norm="batch", **options).eval()
    x, memory = tokens(), tokens(S)
    arguments = {"key_mask": kept(), "memory_key_mask": kept(S)}
    run = torch.compile(stack, backend="eager", fullgraph=True)
    close(run(x, memory, **arguments), stack(x, memory, **arguments), FORWARD)
    torch._dynamo.reset()


def test_a_stack_travels_as_its_state_dict():
    options = {"mechanism": PERFORMER, "norm": "batch", "positions": "learned", "max_length": L}
    stack = encoder(**options)
    stack(tokens())
    other = encoder(seed=9, **options)
    other.load_state_dict(stack.state_dict())
    assert torch.equal(other.eval()(tokens()), stack.eval()(tokens()))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "mechanism", ["softmax(weight_noise=0.3)", "performer(features=8, redraw=1)"]
)
def test_blocks_computed_again_are_the_same(mechanism, padded):
    """Checkpoints: scores of blocks before, memories, draws and running statistics, each once."""
    options = {"norm": "batch", "residual_attention": True, "positions": "rotary", "dropout": 0.3}
    one = decoder("acfac", mechanism=mechanism, **options)
    two = copy.deepcopy(one)
    two.gradient_checkpointing = True
    masks = {"key_mask": kept(), "memory_key_mask": kept(S)} if padded else {}
    found = []
    for stack in (one, two):
        torch.manual_seed(0)
        for step in range(2):  # twice: what is counted moves on
            x, memory = tokens(seed=step).requires_grad_(), tokens(S, 5).requires_grad_()
            out = stack(x, [memory, 2 * memory], **masks)
            found.append((out, gradients(stack, out, [x, memory])))
    for (out, truth), (again, grads) in zip(found[:2], found[2:], strict=True):
        assert torch.equal(again, out)
        for name, gradient in truth.items():
            close(grads[name], gradient, FORWARD, name)  # sums over uses, in another order
    for (name, a), b in zip(one.named_buffers(), two.buffers(), strict=True):
        assert torch.equal(a, b), name


def test_dropout_in_training_alone():
    stack = encoder(dropout=0.4, positions="sinusoidal")
    torch.manual_seed(0)
    first = stack(tokens())
    assert not torch.allclose(stack(tokens()), first)
    torch.manual_seed(0)
    assert torch.equal(stack(tokens()), first)
    close(stack.eval()(tokens()), encoder(positions="sinusoidal")(tokens()), FORWARD)
