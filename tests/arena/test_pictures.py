import numpy as np
import pytest

import subquad as sq
from subquad.arena import pictures


@pytest.mark.parametrize("name", sq.mechanisms())
def test_every_mechanism_has_its_picture(name):
    about = sq.describe(sq.describe(name).info.sample or name)
    page = pictures.draw(sq.describe(name).info.sample or name)
    rows = 2 if about.capabilities.causal else 1
    columns = len(page.axes) // rows
    assert columns * rows == len(page.axes) and columns >= (1 if name == "softmax" else 2)
    for axis in page.axes:
        matrix = axis.images[0].get_array()
        assert matrix.shape == (48, 48) and np.isfinite(matrix).all() and matrix.max() > 0


def test_cells_that_are_not_read_are_told_apart():
    page = pictures.draw("local(window=3)")
    unread = np.ma.getmaskarray(np.ma.masked_invalid(page.axes[1].images[1].get_array()))
    i, j = np.indices((48, 48))
    assert (unread == (abs(i - j) <= 3)).all()  # NaN, not drawn, where a key is read


def test_a_mixer_shows_who_moves_whom():
    page = pictures.draw("gmlp(weights=toeplitz)")
    causal = page.axes[3]  # two rows of softmax and the mixer
    assert "influence" in causal.get_title() and "causal" in causal.get_title()
    shares = np.square(causal.images[0].get_array())
    # The picture holds roots of 48 float32 shares: squared and summed, (48 + 2)·6e-8 = 3e-6.
    assert np.allclose(shares.sum(1), 1.0, atol=1e-5) and not np.triu(shares, 1).any()


def test_what_has_no_matrix_says_why_and_what_has_one():
    with pytest.raises(sq.UnsupportedError, match=r"no one matrix .*; draw 'conv\(kernels=\[1, 5"):
        pictures.draw("conv")


def test_saving(tmp_path):
    pictures.save("local(window=3)", tmp_path / "new" / "local.svg", length=24)
    assert "<svg" in (tmp_path / "new" / "local.svg").read_text()
