"""The C++ reader of clusters, and its gradients, against the torch operations, which define it."""

import ctypes
import dataclasses
import time

import pytest
import torch

import subquad as sq
from subquad.attention.summary import kmeans, refined
from subquad.attention.summary.refined import ABSENT, Tables, Window
from subquad.kernels.native import clusters, library

pytestmark = pytest.mark.skipif(library.compiler() is None, reason="needs a C++ compiler")

# Logits are sums of D <= 65 products with |q·k| <= 10: their error in float32 is below
# sqrt(65)·10·eps = 1e-5 in the mean square sense, 8e-5 at worst, and is a weight's relative error.
# Outputs are sums of such weights less estimates that are at most 1 + SPREAD = 5 times as large.
BOUND = 5 * 8e-5

SIZES = [
    # B, Kv, G, L, S, D, V, M, listed, e
    (2, 3, 1, 131, 131, 7, 11, 13, 3, 3),
    (1, 2, 3, 70, 70, 16, 32, 16, 0, 4),
    (2, 1, 2, 1, 5, 3, 2, 1, 1, 1),
    (1, 2, 1, 64, 301, 64, 64, 37, 5, 2),
    (1, 1, 2, 200, 90, 20, 16, 24, 0, 4),  # more queries than keys
]


def randn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def uniform(*shape, seed):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def case(sizes, *, refine=2, width=None, ragged=False, exact=True):
    """Arguments of `read` that no call would make, but that have everything in them."""
    b, kv, g, queries, keys, d, v, m, listed, each = sizes
    n = b * kv
    bias = randn(n, m + listed, 1, seed=1)
    bias[:, ::5] = ABSENT
    values = torch.cat([randn(n, m + listed, v, seed=2), uniform(n, m + listed, 1, seed=3)], -1)
    values = values.masked_fill(bias == ABSENT, 0.0)
    members = member_values = place = None
    if refine:
        there = uniform(n, m, each, 1, seed=4) > 0.2
        parts = [
            randn(n, m, each, d, seed=5),
            ABSENT * (~there).float(),
            uniform(n, m, each, 1, seed=6),
        ]
        members = torch.cat([parts[0] * there, parts[1], parts[2] * there], -1)
        member_values = torch.cat([randn(n, m, each, v, seed=7), torch.ones(n, m, each, 1)], -1)
        member_values = member_values * there
        place = torch.randint(keys, (n, m, each), generator=torch.Generator().manual_seed(8))
    tables = Tables(
        torch.cat([randn(n, m + listed, d, seed=9), bias], -1), values,
        uniform(n, m, d, seed=10), 0.5 * randn(n, d + 1, d, seed=11), members, member_values,
        place, refine,
    )  # fmt: skip
    window = None
    if width is not None:
        opened = uniform(b, kv, keys, seed=12) > 0.2
        widths = torch.arange(b) % (width + 1) if ragged else None
        window = Window(
            randn(b, kv, keys, d, seed=13), randn(b, kv, keys, v, seed=14), opened,
            uniform(b, kv, keys, seed=15) * opened,
            torch.randint(m, (b, kv, keys), generator=torch.Generator().manual_seed(16)),
            width, widths, exact,
        )  # fmt: skip
    return randn(b, kv * g, queries, d, seed=17), tables, window, d**-0.5, keys - queries


def wide(given):
    """The same in float64."""
    if isinstance(given, torch.Tensor):
        return given.double() if given.is_floating_point() else given
    if dataclasses.is_dataclass(given):
        found = {f.name: wide(getattr(given, f.name)) for f in dataclasses.fields(given)}
        return type(given)(**found)
    return given


def agree(given):
    """Whether both give the same sums; their scale is free."""
    with sq.kernels.use("torch"):
        wanted = refined.read(*map(wide, given))
    with torch.no_grad(), sq.kernels.use("native"):
        found = refined.read(*given)
    lift = torch.exp(found.log_scale.double() - wanted.log_scale)
    for name in ("num", "den"):
        truth, got = getattr(wanted, name), getattr(found, name).double()
        assert got.shape == truth.shape and bool(got.isfinite().all()), name
        factor = lift if name == "den" else lift[..., None]
        # Relative to the weights that are summed, before estimates are subtracted: at least 1 a
        # row, for the largest logit has weight 1, but where nothing is there.
        error = (got * factor - truth).abs().amax().item()
        assert error <= BOUND * max(1.0, truth.abs().amax().item()), f"{name}: {error:.2e}"


@pytest.fixture
def ran(monkeypatch):
    """How often the library was asked."""
    calls, read = [], clusters.read
    monkeypatch.setattr(clusters, "read", lambda *given: calls.append(1) or read(*given))
    return calls


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("refine", [0, 1, 2, 8])
def test_equals_the_torch_operations(ran, sizes, refine):
    for width in (None, 0, 5, 40):
        for ragged in (False, True):
            for exact in (True, False):
                agree(case(sizes, refine=refine, width=width, ragged=ragged, exact=exact))
                if width is None:
                    break
    assert len(ran) == 14


def test_rows_of_any_strides_are_read(ran):
    q, tables, window, scale, offset = case(SIZES[1], width=5)
    apart = torch.stack([q, q], -1)[..., 0]
    turned = window.keys.transpose(1, 2).contiguous().transpose(1, 2)
    opened = window.opened[:, :1].expand(-1, 2, -1)
    strided = dataclasses.replace(window, keys=turned, opened=opened, weight=window.weight * opened)
    agree((apart, tables, strided, scale, offset))
    assert not any(t.is_contiguous() for t in (apart, turned, opened)) and ran


def test_threads_give_the_same(ran):
    given = case((1, 2, 2, 1500, 1500, 16, 16, 8, 2, 2), width=9)
    held, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with torch.no_grad():
                found.append(refined.read(*given))
    finally:
        torch.set_num_threads(held)
    assert len(ran) == 3
    for one in found[1:]:
        assert torch.equal(one.num, found[0].num) and torch.equal(one.den, found[0].den)


def test_nothing_there_weighs_nothing():
    q, tables, _, scale, offset = case(SIZES[0], refine=2)
    keys, members = tables.keys.clone(), tables.members.clone()
    keys[..., -1] = members[..., -2] = ABSENT
    members[..., -1] = 0.0
    nothing = dataclasses.replace(
        tables, keys=keys, values=torch.zeros_like(tables.values), members=members,
        member_values=torch.zeros_like(tables.member_values),
    )  # fmt: skip
    with torch.no_grad():
        part = refined.read(q, nothing, None, scale, offset)
    assert not part.den.any() and not part.num.any()
    assert bool((part.output() == 0).all())


def test_nan_stays_in_its_row():
    given = case(SIZES[3], width=5)
    q = given[0].clone()
    q[0, 1, 7, 3] = float("nan")
    with torch.no_grad():
        found, clean = refined.read(q, *given[1:]), refined.read(*given)
    assert bool(found.num[0, 1, 7].isnan().all())
    found.num[0, 1, 7] = clean.num[0, 1, 7]
    assert torch.equal(found.num, clean.num)


def leaves_of(q, tables, window):
    """The same with numbers that ask for gradients, and these by name."""
    leaves = {"q": q}
    for given, names in ((tables, DIFFERENTIABLE[:5]), (window, DIFFERENTIABLE[5:])):
        for name in names:
            number = None if given is None else getattr(given, name)
            if number is not None:
                leaves[f"{type(given).__name__}.{name}"] = number
    leaves = {name: t.clone().requires_grad_() for name, t in leaves.items()}

    def of(given):
        own = f"{type(given).__name__}."
        new = {n.removeprefix(own): t for n, t in leaves.items() if n.startswith(own)}
        return None if given is None else dataclasses.replace(given, **new)

    return (leaves["q"], of(tables), of(window)), leaves


DIFFERENTIABLE = (
    "keys", "values", "spread", "members", "member_values", "keys", "values", "weight",
)  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("refine", [0, 1, 2, 8])
@pytest.mark.parametrize("width", [None, 0, 5, 40])
def test_gradients_equal_those_of_the_torch_operations(ran, sizes, refine, width):
    for ragged, exact in ((False, True), (True, True), (True, False)):
        given = case(sizes, refine=refine, width=width, ragged=ragged, exact=exact)
        found = {}
        for backend, numbers in (("native", given), ("torch", tuple(map(wide, given)))):
            these, leaves = leaves_of(*numbers[:3])
            with sq.kernels.use(backend):
                part = refined.read(*these, *numbers[3:])
            toward = randn(*part.num.shape, seed=20), randn(*part.den.shape, seed=21)
            loss = (part.num * toward[0]).sum() + (part.den * toward[1]).sum()
            grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
            found[backend] = dict(zip(leaves, grads, strict=True))
        for name, wanted in found["torch"].items():
            got = found["native"][name]
            if wanted is None:  # nothing depends on it
                assert got is None or not got.any(), name
                continue
            # Sums over up to 600 queries of terms with the relative error of a weight each, of
            # which the largest gradient is one: their errors add up like their sizes at worst.
            error = (got.double() - wanted).abs().amax().item()
            assert error <= BOUND * max(1.0, wanted.abs().amax().item()), f"{name}: {error:.2e}"
    assert len(ran) == 3


def test_other_numbers_and_many_clusters_are_not_its_work(ran):
    q, *rest = case(SIZES[1], width=5)
    refined.read(*map(wide, (q, *rest)))
    refined.read(*case((1, 1, 1, 9, 9, 4, 4, 12, 0, 2), refine=clusters.MOST + 1))
    with sq.kernels.use("torch"):
        refined.read(q, *rest)
    assert not ran
    refined.read(q, *rest)
    assert ran


def test_near_far_runs_by_it(ran):
    mech = sq.build("near_far", head_dim=16, num_heads=2).eval()
    q, k, v = (randn(1, 2, 300, 16, seed=i) for i in range(3))
    with torch.no_grad():
        mech(q, k, v)
    assert ran


@pytest.mark.parametrize("sizes", [(2, 3, 131, 7, 13), (1, 2, 64, 64, 128), (1, 1, 1, 3, 1)])
def test_the_nearest_centre_is_the_nearest(sizes):
    batch, heads, rows, width, count = sizes
    x, centres = randn(batch, heads, rows, width, seed=1), randn(batch, heads, count, width, seed=2)
    usable = uniform(batch, heads, count, seed=3) > 0.3
    usable[..., -1] = True
    centres[..., count // 2, :] = centres[..., 0, :]  # of equally near ones the first
    apart = torch.cdist(x.double(), centres.double()).masked_fill(~usable[:, :, None], torch.inf)
    found = kmeans.nearest(x, centres, usable)
    assert found.dtype == torch.int64 and found.shape == x.shape[:3]
    assert bool(usable.gather(-1, found).all())
    # Scores are sums of D products: two that differ by less than their rounding may change places.
    bound = 2 * width * torch.finfo(torch.float32).eps * x.double().norm(dim=-1).max() * 6
    assert bool((apart.gather(-1, found[..., None])[..., 0] <= apart.amin(-1) + bound).all())
    if bool(usable[..., 0].all()):
        assert not bool((found == count // 2).any()) or count // 2 == 0
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(kmeans.nearest(turned, centres, usable), found)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("width", [64, 7, 1])
def test_sums_by_cluster_are_sums(weighted, width):
    x = randn(2, 3, 131, width, seed=1)
    cluster = torch.randint(9, (2, 3, 131), generator=torch.Generator().manual_seed(2))
    weight = uniform(2, 3, 131, seed=3) if weighted else None
    member = torch.nn.functional.one_hot(cluster, 11).double()  # two clusters are empty
    wanted = (member if weight is None else member * weight[..., None]).mT @ x.double()
    found = kmeans.sums(x, cluster, 11, weight)
    # 131 additions, each rounded relative to a sum of |x| <= 131·4.
    assert (found - wanted).abs().max() <= 131 * torch.finfo(torch.float32).eps * 40
    x.requires_grad_()
    kmeans.sums(x, cluster, 11, weight).square().sum().backward()
    assert x.grad is not None and bool(x.grad.abs().sum() > 0)


@pytest.mark.parametrize("name", ["Read", "Nearest", "Sums"])
def test_the_structs_are_those_that_c_has(name):
    size = getattr(library.library(), f"subquad_{name.lower()}_call_size")()
    assert size == ctypes.sizeof(getattr(clusters, f"_{name}Call"))


def test_weights_too_small_for_a_number_cost_nothing(ran):
    """A subnormal result takes a hundred times as long: logits of masked keys must not make any."""
    q, tables, window, *rest = case((1, 4, 1, 512, 512, 32, 32, 32, 0, 2), width=16)
    keys = tables.keys.clone()
    keys[..., -1] = keys[..., -1].masked_fill(keys[..., -1] == ABSENT, 0.0)
    far = keys.clone()
    far[:, 1:, -1] = -95.0  # 2^-137 beside the first cluster
    seconds = {}
    for _ in range(7):
        for name, these in (("near", keys), ("far", far)):
            given = dataclasses.replace(tables, keys=these)
            began = time.process_time()
            refined.read(q, given, window, *rest)
            seconds.setdefault(name, []).append(time.process_time() - began)
    # With subnormals it is nine times as slow: the processor makes each of them by microcode.
    assert min(seconds["far"]) < 1.5 * min(seconds["near"])
