"""`conv`: laws for kernels that know the values' width, limits, residuals, penalties, errors."""

import copy
import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import laws
import subquad as sq
from variants import inputs, make

B, H, HKV, D = 2, 6, 3, 5
BOUND = laws.EXACT
LENGTH = 1024  # max_length of `make`


def build(spec="conv", **sizes):
    sizes = {"head_dim": D, "num_heads": H, "num_kv_heads": HKV, "dtype": torch.float64, **sizes}
    return sq.build(spec, **sizes).eval()


def tensors(queries=31, keys=31, **options):
    return inputs(queries, keys, **{"value": D, **options})


# The laws of the registry take values of any width, with conv=shared and combine=sum. Here the
# other forms, with V = D.
WIDE = [
    "conv(kernels=[3, 4], noise=0.3)",
    "conv(kernels=[5], conv=full, noise=0.3, sharing=qkv, residual=true, combine=sum)",
    "conv(kernels=[2, 1, 3], conv=full, noise=0.3, sharing=kv, padding=causal, "
    "inner=performer(features=13))",
    "conv(kernels=[3, 2], noise=0.3, columns=67, sharing=qk, inputs=qk)",
    "conv(kernels=[4], noise=0.3, rows=61, residual=true, inputs=qv)",
]
CAUSAL = WIDE[:3]


@pytest.fixture
def wide(monkeypatch):
    def as_wide(*args, **options):
        return inputs(*args, **{**options, "value": options.get("dim", D)})

    monkeypatch.setattr(laws, "inputs", as_wide)


@pytest.mark.usefixtures("wide")
class TestLawsWithValuesAsWideAsKeys:
    @pytest.mark.parametrize("kind", ["none", "key"])
    @pytest.mark.parametrize("spec", WIDE)
    def test_parity(self, spec, kind):
        laws.parity(spec, kind, 37, 37)

    @pytest.mark.parametrize("length", [1, 2, 37])
    @pytest.mark.parametrize("spec", CAUSAL)
    def test_causal_parity(self, spec, length):
        laws.parity(spec, "causal+key", length, length)

    @pytest.mark.parametrize("spec", CAUSAL)
    def test_causality_and_streaming(self, spec):
        laws.causality(spec)
        laws.streaming(spec)
        laws.state_operations(spec)

    @pytest.mark.parametrize("spec", WIDE)
    def test_padding(self, spec):
        laws.junk(spec)
        laws.right_padding(spec)
        laws.no_key(spec)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("spec", WIDE)
    def test_dtypes(self, spec, dtype):
        laws.dtypes(spec, dtype)

    @pytest.mark.parametrize("spec", WIDE)
    def test_modules(self, spec):
        laws.citizenship(spec)
        laws.checkpointed(spec)
        laws.autocast(spec)
        laws.huge_logits(spec)

    @pytest.mark.slow
    @pytest.mark.parametrize("spec", WIDE)
    def test_compiled(self, spec):
        laws.gradients(spec)
        laws.compiled(spec)
        laws.exported(spec)


# ---- limits -------------------------------------------------------------------------------


@pytest.mark.parametrize("conv", ["depthwise", "full", "shared"])
@pytest.mark.parametrize(
    "options", ["kernels=[1]", "kernels=[1], combine=sum", "kernels=[4, 3], sharing=qkv"]
)
@pytest.mark.parametrize("inner", ["softmax", "local(window=5)", "performer(features=16)"])
@pytest.mark.parametrize("causal", [False, True])
def test_identities_are_the_inner_mechanism(conv, options, inner, causal):
    """Also a sum: with kernels of their own the values start at 1/K."""
    q, k, v = tensors(grad=True)
    key = laws.key_mask(B, 31)
    mech = build(f"conv({options}, noise=0, conv={conv}, inner={inner})")
    # Draws of the first kernel's inner mechanism are those of the seed, of others the next ones.
    if "performer" in inner and len(mech.inner) > 1:
        mech.inner[1].load_state_dict(mech.inner[0].state_dict())
    wanted = build(inner)(q, k, v, causal=causal, key_mask=key)
    out = mech(q, k, v, causal=causal, key_mask=key)
    opened = key[:, None, :, None]  # rows of masked queries are padding
    laws.close(out * opened, wanted * opened)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).double()
    for a, b in zip(
        torch.autograd.grad(out, (q, k, v), cotangent * opened),
        torch.autograd.grad(wanted, (q, k, v), cotangent * opened),
        strict=True,
    ):
        laws.close(a, b)


def test_a_sum_starts_as_a_mean_where_values_have_their_own_kernels():
    q, k, v = tensors()
    wanted = build("softmax")(q, k, v)
    laws.close(build("conv(kernels=[3, 5], noise=0, combine=sum)")(q, k, v), wanted)
    tied = build("conv(kernels=[3, 5], noise=0, combine=sum, sharing=kv)")
    laws.close(tied(q, k, v), 2 * wanted)


def test_projections_that_are_identities_are_exact():
    q, k, v = tensors(30, 30)
    mech = build("conv(kernels=[3], noise=0, rows=30, columns=30)", max_length=30)
    laws.close(mech(q, k, v), build("softmax")(q, k, v))
    key = torch.arange(30).expand(B, 30) % 4 != 1
    opened = key[:, None, :, None]
    wanted = build("softmax")(q, k, v, key_mask=key)
    laws.close(mech(q, k, v, key_mask=key) * opened, wanted * opened)


def test_untrained_projections_are_means_of_windows():
    q, k, v = tensors(28, 28)
    mech = build("conv(kernels=[1], noise=0, rows=14, columns=7)", max_length=56)
    # Positions 0 … 55 are in 14 windows of 4 queries and 7 of 8 keys: 28 fill three and a half,
    # and the other three are left out.
    short_q = q.unflatten(2, (7, 4)).mean(3)
    short_k, short_v = (torch.stack([part.sum(2) / 8 for part in t.split(8, 2)], 2) for t in (k, v))
    wanted = build("softmax")(short_q, short_k, short_v).repeat_interleave(4, 2)
    laws.close(mech(q, k, v), wanted)


def test_untrained_it_is_near_its_inner_mechanism():
    """Noise of 0.02 in nine taps moves a feature by 0.02·√9 = 6%: far below the 100% of attention
    that looks at nothing.
    """
    q, k, v = tensors(64, 64, size=1.5)
    wanted = build("softmax")(q, k, v)
    uniform = v.mean(2, keepdim=True).repeat_interleave(H // HKV, 1)
    error = (build("conv(kernels=[1, 5, 9])")(q, k, v) - wanted).norm()
    assert 0 < error < 0.2 * (uniform - wanted).norm()


# ---- kernels ------------------------------------------------------------------------------


@pytest.mark.parametrize("conv", ["depthwise", "full", "shared"])
def test_causal_calls_leave_out_the_taps_to_the_right(conv):
    mech = build(f"conv(kernels=[5, 4], conv={conv}, noise=0.3)")
    cut = copy.deepcopy(mech)
    for (left, _), kernel in zip(cut.config.spans, cut.kernels, strict=True):
        for weight in kernel.values():
            weight.data[:, left + 1 :] = 7.0  # what stands there must not matter
    q, k, v = tensors()
    assert torch.equal(mech(q, k, v, causal=True), cut(q, k, v, causal=True))
    assert not torch.allclose(mech(q, k, v), cut(q, k, v))


def test_sharing_names_the_same_parameter():
    kernels = {
        "none": {"q": H, "k": HKV, "v": HKV},
        "qk": {"qk": HKV, "v": HKV},
        "kv": {"kv": HKV, "q": H},
        "qkv": {"qkv": HKV},
    }
    for sharing, wanted in kernels.items():
        mech = build(f"conv(kernels=[3, 3], sharing={sharing})")
        for kernel in mech.kernels:
            assert {group: len(weight) for group, weight in kernel.items()} == wanted
            assert all(weight.shape[1:] == (3, D) for weight in kernel.values())
        first, second = (next(iter(kernel.values())) for kernel in mech.kernels)
        assert not torch.equal(first, second)  # two kernels of one size start apart
    assert set(build("conv(inputs=kv, sharing=qkv)").kernels[0]) == {"kv"}


def test_masked_tokens_are_zeros_in_windows():
    mech = build("conv(kernels=[5], noise=0.3)")
    q, k, v = tensors()
    key = laws.key_mask(B, 31)
    opened = key[:, None, :, None]
    zeros = [t * opened for t in (q, k, v)]
    laws.close(mech(q, k, v, key_mask=key), mech(*zeros, key_mask=key), 0.0)


def test_cross_attention_reads_queries_one_by_one():
    mech = build(str(sq.ConvConfig(kernels=(3, 4), noise=0.3).for_use("cross")))
    assert mech.config.inputs == "kv"
    q, k, v = tensors(7, 31)
    key = laws.key_mask(B, 31)
    rows = [mech(q[:, :, i : i + 1], k, v, key_mask=key) for i in range(7)]
    laws.close(torch.cat(rows, 2), mech(q, k, v, key_mask=key))


# ---- residual -----------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [None, 0.2])
def test_a_residual_adds_scores(scale):
    """Against matrices of scores, summed: M = q·k, then each kernel's own."""
    mech = build("conv(kernels=[3, 1, 4], noise=0.3, residual=true)")
    q, k, v = tensors()
    groups, wanted = H // HKV, 0.0
    scores = q @ k.repeat_interleave(groups, 1).mT
    features = (mech._features(role, x, 0, 1) for role, x in zip("qkv", (q, k, v), strict=True))
    for m, (own_q, own_k, own_v) in enumerate(zip(*features, strict=True)):
        own_k, own_v = (t.repeat_interleave(groups, 1) for t in (own_k, own_v))
        own = slice(D * (m + 1), None)  # φ_m stands behind q or k, and the features before it
        scores = scores + own_q[..., own] @ own_k[..., own].mT
        weights = torch.softmax(scores * (D**-0.5 if scale is None else scale), -1)
        wanted = wanted + weights @ own_v @ mech.projection[:, m]
    laws.close(mech(q, k, v, scale=scale), wanted)


def test_a_residual_of_identities_is_sharper_softmax():
    q, k, v = tensors()
    mech = build("conv(kernels=[3, 5], noise=0, residual=true)")
    softmax = build("softmax")
    wanted = sum(softmax(q, k, v, scale=m * D**-0.5) for m in (2, 3)) / 2
    laws.close(mech(q, k, v), wanted)


# ---- penalties ----------------------------------------------------------------------------


@pytest.mark.parametrize("conv", ["depthwise", "full", "shared"])
def test_the_penalty_is_what_norms_exceed(conv):
    mech = build(f"conv(kernels=[3, 5], conv={conv}, sharing=qk, noise=0.3)")
    threshold = 1.0 if conv == "shared" else math.sqrt(D)
    wanted = 0.0
    for kernel in mech.kernels:
        for weight in kernel.values():
            for matrix in weight:
                wanted += max(0.0, matrix.square().sum().sqrt().item() - threshold)
    assert wanted > 0
    # some 10^3 roundings at most between two orders of summation
    assert mech.penalty().item() == pytest.approx(wanted, rel=1e3 * torch.finfo(float).eps)
    assert build(f"conv(conv={conv}, noise=0.3, threshold=1e3)").penalty() == 0
    assert build(f"conv(conv={conv}, noise=0)").penalty() == 0


def test_a_shared_kernel_is_counted_once():
    """Kernels of one entry, 2: ‖W‖_F − τ = 2 − 1 a head, for each kernel that there is."""

    def penalty(sharing):
        mech = build(f"conv(kernels=[1], conv=shared, combine=sum, sharing={sharing})")
        with torch.no_grad():
            for weight in mech.kernels.parameters():
                weight.fill_(2.0)
        return mech.penalty().item()

    found = {sharing: penalty(sharing) for sharing in ("none", "qk", "kv", "qkv")}
    wanted = {"none": H + 2 * HKV, "qk": 2 * HKV, "kv": H + HKV, "qkv": HKV}
    assert found == wanted


def test_descending_the_penalty_brings_norms_to_the_threshold():
    mech = build("conv(kernels=[3], noise=0.5, threshold=1.5)")
    free = mech.inner[0]
    assert sq.penalties(free) == 0
    before = mech.projection.clone()
    optimizer = torch.optim.SGD(mech.parameters(), lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        loss = sq.penalties(mech)
        if loss == 0:
            break
        loss.backward()
        optimizer.step()
    norms = torch.cat([weight.flatten(1).norm(dim=1) for weight in mech.kernels.parameters()])
    # a step is 0.05 along the gradient, whose norm is 1: none falls further below than that
    assert (norms <= 1.5).all() and (norms > 1.5 - 0.05 - 1e-9).any()
    assert torch.equal(mech.projection, before)


def doubled(mech):
    with torch.no_grad():
        for weight in mech.kernels.parameters():
            weight.mul_(2.0)
    return mech


def test_penalties_add_each_mechanism_of_a_model_once():
    spec = "conv(kernels=[3], noise=0, conv=shared)"  # norms are τ = 1
    mech = doubled(build(spec))
    one = float(H + 2 * HKV)
    assert sq.penalties(mech).item() == one
    other = doubled(build(spec))
    model = torch.nn.ModuleList([mech, other, torch.nn.Sequential(mech, torch.nn.Linear(3, 3))])
    assert sq.penalties(model).item() == 2 * one
    nested = build(f"conv(kernels=[3], noise=0, conv=shared, inner={spec})")
    doubled(nested)
    doubled(nested.inner[0])
    assert sq.penalties(nested).item() == 2 * one and nested.penalty().item() == one
    mixed = build(f"mixed({spec}*2, softmax)")
    doubled(mixed.parts[0])
    assert sq.penalties(mixed).item() == 2 + 1 + 1 and mixed.penalty() == 0


def test_penalties_of_layers_and_models():
    spec = "conv(kernels=[3], noise=0, conv=shared)"
    layers = [sq.TransformerEncoderLayer(12, 3, 16, mechanism=spec) for _ in range(2)]
    for part in torch.nn.Sequential(*layers).modules():
        if isinstance(part, sq.Mechanism) and part.name == "conv":
            doubled(part)
    found = sq.penalties(torch.nn.Sequential(*layers))
    assert found.item() == 2 * 9 and found.requires_grad
    found.backward()
    assert sq.penalties(torch.nn.Linear(2, 2)).item() == 0
    assert sq.penalties(build("softmax")).item() == 0
    with pytest.raises(sq.OptionError, match=r"must be a torch\.nn\.Module, given list"):
        sq.penalties(layers)


@pytest.mark.parametrize("name", sq.mechanisms())
def test_every_mechanism_has_a_penalty(name):
    if sq.describe(name).capabilities.qkv:
        found = make(name).penalty()
        assert found.shape == () and torch.isfinite(found) and found >= 0


# ---- states -------------------------------------------------------------------------------


def test_a_state_has_the_size_that_it_says():
    mech = build("conv(kernels=[2, 4], padding=causal, inner=performer(features=8))")
    q, k, v = tensors()
    _, state = mech.prefill(q, k, v)
    inner = [part.prefill(q, k, v)[1].nbytes for part in mech.inner]
    assert state.nbytes == 8 * B * 3 * (H * D + 2 * HKV * D) + sum(inner)  # 3 = 4 − 1 tokens
    for tail in state.tails:
        assert tail.untyped_storage().nbytes() == tail.nbytes  # copies, not slices of all tokens
    assert len(build("conv(inputs=kv)").prefill(q, k, v)[1].tails) == 2


def test_states_of_other_options_are_refused():
    q, k, v = tensors()
    mech = build("conv(kernels=[3])")
    for spec, what in (
        ("conv(kernels=[3, 3])", "1 kernels, given 2"),
        ("conv(kernels=[3], inputs=kv)", "3 convolved inputs, given 2"),
    ):
        state = build(spec).prefill(q, k, v)[1]
        with pytest.raises(sq.ShapeError, match=f"state must be that of {what}"):
            mech.step(q, k, v, state)
    wider = build("conv(kernels=[5])").prefill(q, k, v)[1]
    with pytest.raises(sq.ShapeError, match="state must hold the last 1 tokens, given 2"):
        mech.step(q, k, v, wider)
    state = mech.prefill(q, k, v)[1]
    with pytest.raises(sq.DtypeError, match=r"q must have the state's dtype torch\.float64"):
        mech.float().step(q.float(), k.float(), v.float(), state)


# ---- what it can do -----------------------------------------------------------------------


def test_capabilities_follow_the_options():
    def have(spec):
        return sq.describe(spec).capabilities

    plain = have("conv")
    assert plain.state == "growing" and plain.causal and not plain.cross and not plain.read
    assert have("conv(inner=performer)").state == "constant"
    assert have("conv(inputs=kv)").cross and not have("conv(inputs=kv)").read
    assert have("conv(inputs=kv, padding=causal)").read
    alone = have("conv(kernels=[1])")
    for kind in ("cross", "read", "segments", "window", "dense", "compact"):
        assert getattr(alone, kind) and not getattr(plain, kind)
        assert not getattr(have("conv(kernels=[1], inner=performer)"), kind) or kind in (
            "cross", "read", "compact",
        )  # fmt: skip
    for spec in ("conv(columns=8)", "conv(kernels=[1], rows=8)"):
        squeezed = have(spec)
        assert squeezed.max_length and not squeezed.causal and not squeezed.state
        assert "positions" in squeezed.causal.reason
    assert have("conv(columns=8, inputs=kv)").cross and not have("conv(rows=8, inputs=kv)").cross
    assert have("conv(conv=shared, combine=sum)").weights and not plain.weights
    assert not have("conv(conv=shared)").weights
    assert have("conv(inputs=qk, combine=sum)").weights
    assert have("conv(inner=nystrom)").causal.reason == have("nystrom").causal.reason
    assert plain.reach == "all past tokens, and 2 tokens before each of them"


def test_uses_fill_in_what_is_open():
    config = sq.ConvConfig(inner="near_far")
    causal = config.for_use("causal")
    assert causal.padding == "causal" and causal.inner.options["window"] == 64
    assert config.for_use("encoder").padding == "auto"
    assert sq.ConvConfig(padding="same").for_use("causal").padding == "same"
    assert sq.ConvConfig(inputs="qk").for_use("cross").inputs == "qk"


def test_specs_read_and_write():
    spec = "conv(kernels=[1, 3], inner=performer(features=64), residual=true)"
    config = sq.describe(spec).config
    assert str(config) == spec and config == sq.ConvConfig(
        kernels=[1, 3], inner=sq.PerformerConfig(features=64), residual=True
    )
    assert sq.ConvConfig(kernels=3).kernels == (3,) and str(sq.ConvConfig()) == "conv"
    assert sq.ConvConfig(inner="softmax") == sq.ConvConfig()


def test_it_calibrates_its_inner_mechanism():
    mech = build("conv(inner=performer(features=16, gauge=centre, statistics=calibrated))")
    q, k, v = tensors()
    with pytest.raises(sq.CalibrationError):
        mech(q, k, v)
    mech.calibrate(q, k)
    assert torch.isfinite(mech(q, k, v)).all()
    with pytest.raises(sq.OptionError, match="inner=softmax takes nothing from data"):
        build().calibrate(q, k)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("kernels=[]", r"kernels=\(\) must be a list of sizes ≥ 1"),
        ("kernels=[3, 0]", r"kernels=\(3, 0\) must be a list of sizes ≥ 1"),
        ("kernels=wide", "kernels='wide' must be a list of sizes"),
        ("combine=mean", "combine='mean' is none of concat, sum"),
        ("conv=ful", "conv='ful' is none of depthwise, full, shared.*did you mean 'full'"),
        ("sharing=vk", "sharing='vk' is none of none, qk, kv, qkv"),
        ("inputs=all", "inputs='all' is none of"),
        ("columns=0", "columns=0 must be an integer ≥ 1"),
        ("threshold=-1.0", r"threshold=-1\.0 must be a number ≥ 0"),
        ("noise=-1.0", "noise=-1.0 must be a number ≥ 0"),
        ("inner=sofmax", "inner: unknown mechanism 'sofmax'.*did you mean 'softmax'"),
        ("inner=linear, residual=true", r"do not estimate exp\(scale·q·k\)"),
        ("inner=local, columns=8", "inner=local: projected rows or columns have no positions"),
        ("inner=compressed(query_stride=2)", "outputs of kernels would not line up"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(sq.OptionError, match=message):
        sq.describe(f"conv({options})")


def test_wrong_sizes():
    with pytest.raises(sq.OptionError, match="max_length is needed"):
        build("conv(columns=8)")
    with pytest.raises(sq.OptionError, match="rows=8 must be ≤ max_length=7"):
        build("conv(rows=8)", max_length=7)
    with pytest.raises(sq.OptionError, match="sharing=kv with conv=full needs value_dim = head_di"):
        build("conv(sharing=kv, conv=full)", value_dim=D + 2)
    build("conv(sharing=kv, conv=shared)", value_dim=D + 2)
    mech = build("conv(columns=4)", max_length=30)
    with pytest.raises(sq.ShapeError, match="k has length 31, longer than max_length=30"):
        mech(*tensors())
    with pytest.raises(sq.UnsupportedError, match="inputs=kv leaves queries as they are"):
        build()(*tensors(17, 31))


# ---- cost ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec", ["conv(inner=local(window=64))", "conv(columns=64, rows=64)", "conv(inner=linear)"]
)
def test_declared_cost_is_linear(spec):
    about = sq.describe(spec)
    assert about.flops(65536) / about.flops(16384) < 4.1
    assert about.memory(65536) / about.memory(16384) < 4.1


def test_declared_cost_counts_what_is_computed():
    for spec in (
        "conv(kernels=[3, 5], conv=full)",
        "conv(kernels=[3], columns=16, rows=32, combine=sum)",
        "conv(kernels=[1, 3], residual=true)",
    ):
        mech = sq.build(spec, head_dim=16, num_heads=1, max_length=256).eval()
        q = torch.randn(1, 1, 256, 16)
        # The counter does not know the CPU's fused kernel.
        with (
            FlopCounterMode(display=False) as counter,
            torch.no_grad(),
            sdpa_kernel(SDPBackend.MATH),
        ):
            mech(q, q, q)
        declared = sq.describe(spec).flops(256, 16, 16)
        # Values are padded to the residual's width in the fused kernel: not what is asked for.
        more = 2.0 * 256**2 * 16 * 3 if "residual" in spec else 0.0
        assert counter.get_total_flops() == pytest.approx(declared + more, rel=0.02), spec


# ---- in models ----------------------------------------------------------------------------


def test_converted_models_keep_their_output_and_generate():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
             "intermediate_size": 32}  # fmt: skip
    ids = torch.randint(0, 50, (2, 20))
    encoder = transformers.BertModel(transformers.BertConfig(**sizes)).eval()
    wanted = encoder(ids).last_hidden_state
    sq.convert(encoder, "conv(noise=0)")
    # two layers in float32, outputs of size 1 by their last norm: 10^2 roundings
    assert (encoder(ids).last_hidden_state - wanted).abs().max() < 1e2 * 2**-23
    sq.convert(encoder, "conv(noise=0.3)")
    assert sq.penalties(encoder).item() > 0
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, eos_token_id=None)
    decoder = transformers.LlamaForCausalLM(config).eval()
    sq.convert(decoder, "conv(noise=0.3, inner=local(window=8))")
    made = decoder.generate(ids, max_new_tokens=4, do_sample=False)  # with a state
    for _ in range(4):
        ids = torch.cat([ids, decoder(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(made, ids)


def test_decoders_leave_queries_of_the_memory_as_they_are():
    """A layer and a stack with one mechanism for both attentions; steps equal the whole call."""
    layer = sq.TransformerDecoderLayer(12, 3, 16, 0.0, batch_first=True, mechanism="conv").eval()
    stack = sq.TransformerDecoder(12, 3, 1, 16, 0.0, mechanism="conv").eval()
    kinds = [part.config.inputs for part in stack.modules() if getattr(part, "name", "") == "conv"]
    assert kinds == ["auto", "kv"] and layer.multihead_attn.mechanism.config.inputs == "kv"
    generator = torch.Generator().manual_seed(0)
    x, memory = (torch.randn(B, n, 12, generator=generator) for n in (7, 11))
    assert torch.isfinite(layer(x, memory, tgt_is_causal=True)).all()
    wanted = stack(x, memory)
    first, state = stack.prefill(x[:, :4], memory)
    rest, _ = stack.step(x[:, 4:], state)
    # float32: two attentions and a network of numbers of size 1 after norms, 10^2 roundings
    assert (torch.cat([first, rest], 1) - wanted).abs().max() < 1e2 * 2**-23


def cycles(count, generator, tokens=12, length=24):
    """Each row repeats a cycle through all tokens, of its own: (count, length + 1)."""
    order = torch.rand(count, tokens, generator=generator).argsort(1)
    return order[:, torch.arange(length + 1) % tokens]


class _OneLayer(torch.nn.Module):
    """Embedding, one causal attention without positions, and a readout."""

    def __init__(self, mechanism):
        super().__init__()
        self.embed = torch.nn.Embedding(12, 32)
        self.attention = sq.MultiheadAttention(32, 2, batch_first=True, mechanism=mechanism)
        self.readout = torch.nn.Linear(32, 12)

    def forward(self, x):
        x = self.embed(x)
        return self.readout(self.attention(x, x, x, is_causal=True)[0])


@pytest.mark.slow
def test_one_layer_of_two_taps_learns_to_continue_a_cycle():
    """Keys that hold the token before find what came after the last time: one layer is enough.

    Softmax without positions sees a set of tokens: of 12 it cannot tell the next one.
    """

    def accuracy(mechanism):
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(0)
        model = _OneLayer(mechanism)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(120):
            x = cycles(32, generator)
            logits, wanted = model(x[:, :-1])[:, 12:], x[:, 13:]  # from the second round on
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
            optimizer.zero_grad()
            (loss + 0.01 * sq.penalties(model)).backward()
            optimizer.step()
        x = cycles(200, generator)
        with torch.no_grad():
            return (model(x[:, :-1])[:, 12:].argmax(-1) == x[:, 13:]).float().mean().item()

    assert accuracy("conv(kernels=[2], padding=causal)") > 0.95
    assert accuracy("softmax") < 0.5
