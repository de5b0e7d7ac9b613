"""Every wrong argument gives its documented error, which names it and what was expected."""

import pytest
import torch

import subquad as sq
from subquad.errors import nearest

B, H, HKV, L, S, D, V = 2, 6, 3, 7, 11, 5, 13


def call(q=(B, H, L, D), k=(B, HKV, S, D), v=(B, HKV, S, V), mechanism="softmax", **arguments):
    tensors = [torch.ones(x) if isinstance(x, tuple) else x for x in (q, k, v)]
    return sq.attention(*tensors, mechanism, **arguments)


def test_the_right_call_works():
    assert call().shape == (B, H, L, V)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        # names and options
        (
            {"mechanism": "sofmax"},
            sq.UnknownNameError,
            "unknown mechanism 'sofmax' (did you mean 'softmax'?); registered: softmax, additive",
        ),
        ({"mechanism": "zzz"}, sq.UnknownNameError, "unknown mechanism 'zzz'; registered: softmax"),
        (
            {"dropot": 0.1},
            sq.UnknownNameError,
            "softmax: unknown option 'dropot' (did you mean 'dropout'?); options are: dropout",
        ),
        ({"dropout": 2}, sq.OptionError, "softmax: dropout=2 must be a number ≥ 0 and ≤ 1"),
        ({"mechanism": "softmax(dropout=0.1"}, sq.OptionError, "at position 19"),
        (
            {"mechanism": "softmax(dropout=0)", "dropout": 0},
            sq.OptionError,
            "options ['dropout'] are given twice: in 'softmax(dropout=0)' and as keywords",
        ),
        (
            {"mechanism": sq.SoftmaxConfig(), "dropout": 0},
            sq.OptionError,
            "options ['dropout'] given beside a config object; use dataclasses.replace",
        ),
        (
            {"mechanism": 3},
            sq.OptionError,
            "a mechanism is a name, a string such as 'performer(features=256)' or a config "
            "object, given int",
        ),
        ({"mask": torch.ones(L, S)}, sq.OptionError, "mask must be a subquad.Mask, given Tensor"),
        # shapes
        ({"q": (L, D)}, sq.ShapeError, "q must be (..., H, length, D), given (7, 5)"),
        ({"k": (S, D)}, sq.ShapeError, "k must be (..., H, length, D), given (11, 5)"),
        ({"k": (B, HKV, S, 4)}, sq.ShapeError, "k must be (2, Hkv=3, S, D=5), given (2, 3, 11, 4)"),
        ({"k": (3, HKV, S, D)}, sq.ShapeError, "k must be (2, Hkv=3, S, D=5), given (3, 3, 11, 5)"),
        ({"v": (B, H, S, V)}, sq.ShapeError, "v must be (2, Hkv=3, S, V), given (2, 6, 11, 13)"),
        ({"v": (HKV, S, V)}, sq.ShapeError, "v must be (2, Hkv=3, S, V), given (3, 11, 13)"),
        (
            {"v": (B, HKV, L, V)},
            sq.ShapeError,
            "k and v must have one length S ≥ 1, given 11 and 7",
        ),
        ({"k": (B, HKV, 0, D), "v": (B, HKV, 0, V)}, sq.ShapeError, "S ≥ 1, given 0 and 0"),
        ({"q": (B, H, 0, D)}, sq.ShapeError, "q must have at least one query, given (2, 6, 0, 5)"),
        (
            {"k": (B, 4, S, D), "v": (B, 4, S, V)},
            sq.OptionError,
            "num_kv_heads=4 must divide num_heads=6",
        ),
        (
            {"key_mask": torch.ones(B, L, dtype=torch.bool)},
            sq.ShapeError,
            "key_mask must broadcast to (2, 11), given (2, 7)",
        ),
        (
            {"mask": sq.Mask(dense=torch.ones(S, L))},
            sq.ShapeError,
            "dense mask must be (..., L, S) or (..., H, L, S) with L, S = 7, 11, given (11, 7)",
        ),
        (
            {"mask": sq.Mask(dense=torch.ones(HKV, L, S))},
            sq.ShapeError,
            "dense mask must have H=6 heads or 1, given 3",
        ),
        # dtypes
        (
            {"q": torch.ones(B, H, L, D, dtype=torch.long)},
            sq.DtypeError,
            "q must be one of float16, bfloat16, float32, float64, given torch.int64",
        ),
        (
            {"k": torch.ones(B, HKV, S, D).double()},
            sq.DtypeError,
            "k must have q's dtype torch.float32, given torch.float64",
        ),
        (
            {"v": torch.ones(B, HKV, S, V).half()},
            sq.DtypeError,
            "v must have q's dtype torch.float32, given torch.float16",
        ),
        # devices
        (
            {"k": torch.ones(B, HKV, S, D, device="meta")},
            sq.DeviceError,
            "k is on meta, q is on cpu",
        ),
        (
            {"v": torch.ones(B, HKV, S, V, device="meta")},
            sq.DeviceError,
            "v is on meta, q is on cpu",
        ),
        (
            {"key_mask": torch.ones(B, S, dtype=torch.bool, device="meta")},
            sq.DeviceError,
            "key_mask is on meta, the queries are on cpu",
        ),
    ],
)
def test_wrong_arguments_are_named(arguments, error, words):
    with pytest.raises(error) as caught:
        call(**arguments)
    assert words in str(caught.value)
    assert isinstance(caught.value, sq.SubquadError)


def test_a_key_mask_that_is_not_bool_is_named():
    with pytest.raises(sq.DtypeError, match="key_mask must be torch.bool with True = attend"):
        call(key_mask=torch.ones(B, S))


def test_a_module_on_another_device_is_named():
    mech = sq.build("additive", head_dim=D, num_heads=H, num_kv_heads=HKV, device="meta")
    with pytest.raises(sq.DeviceError, match=r"q is on cpu, additive is on meta; move one"):
        mech(torch.ones(B, H, L, D), torch.ones(B, HKV, S, D), torch.ones(B, HKV, S, V))


def test_wrong_sizes_are_reported_at_once():
    with pytest.raises(sq.OptionError) as caught:
        sq.build("softmax", head_dim=0, num_heads=2.0, value_dim=-1, seed=1.5)
    text = str(caught.value)
    for words in (
        "head_dim=0 must be an integer ≥ 1",
        "num_heads=2.0",
        "value_dim=-1",
        "seed=1.5 must be an integer",
    ):
        assert words in text


def test_a_module_names_its_own_sizes():
    mech = sq.build("softmax", head_dim=D, num_heads=H, num_kv_heads=HKV, value_dim=V)
    q, k, v = torch.ones(B, H, L, D), torch.ones(B, HKV, S, D), torch.ones(B, HKV, S, V)
    with pytest.raises(sq.ShapeError, match=r"q must be \(..., H=6, L, D=5\), given \(2, 3, 11, 5"):
        mech(k, k, v)
    with pytest.raises(sq.ShapeError, match=r"v must be \(2, Hkv=3, S, V=13\)"):
        mech(q, k, v[..., :4])
    with pytest.raises(sq.ShapeError, match="k and v must both be given, or both be None"):
        mech.step(q, k, None, None)
    with pytest.raises(sq.ShapeError, match="step without k and v needs a state"):
        mech.step(q, None, None, None)
    _, state = mech.prefill(q, k[:, :, :L], v[:, :, :L])
    with pytest.raises(sq.ShapeError, match="takes no key_mask: there are no new keys"):
        mech.step(q, None, None, state, key_mask=torch.ones(B, S, dtype=torch.bool))


def test_unsupported_names_mechanism_request_reason_and_alternatives():
    with pytest.raises(sq.UnsupportedError) as caught:
        call(mechanism="additive")
    error = caught.value
    assert error.mechanism == "additive" and error.request == "the functional form"
    assert "softmax" in error.alternatives and "additive" not in error.alternatives
    assert str(error).startswith("'additive' does not support the functional form: its scoring")
    assert str(error).endswith("These do: " + ", ".join(error.alternatives))
    plain = sq.UnsupportedError("x", "y")
    assert str(plain) == "'x' does not support y" and plain.alternatives == ()


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (sq.OptionError, ValueError),
        (sq.UnknownNameError, LookupError),
        (sq.UnknownNameError, ValueError),
        (sq.ShapeError, ValueError),
        (sq.DtypeError, TypeError),
        (sq.DeviceError, ValueError),
        (sq.UnsupportedError, NotImplementedError),
        (sq.CalibrationError, RuntimeError),
    ],
)
def test_errors_are_also_the_builtin_that_fits(error, builtin):
    assert issubclass(error, builtin) and issubclass(error, sq.SubquadError)


def test_nearest_suggests_only_what_is_near():
    assert nearest("perfomer", ["performer", "softmax"]) == " (did you mean 'performer'?)"
    assert nearest("zzz", ["performer", "softmax"]) == ""
    assert nearest("x", []) == ""


def test_an_empty_batch_has_a_graph() -> None:
    leaves = [torch.zeros(0, 2, 5, 4, requires_grad=True) for _ in range(3)]
    out = sq.attention(*leaves, "performer")
    out.sum().backward()
    assert out.shape == (0, 2, 5, 4)
    assert all(leaf.grad is not None and leaf.grad.shape == leaf.shape for leaf in leaves)
