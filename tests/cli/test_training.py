"""``subquad train``, ``translate``, ``generate`` and ``score``: a user's own file, end to end."""

from __future__ import annotations

import json
import random
import sys

import pytest
from typer.testing import CliRunner

from subquad.cli.app import app

pytest.importorskip("transformers")
sacrebleu = pytest.importorskip("sacrebleu")

WORDS = {"one": "eins", "two": "zwei", "three": "drei", "four": "vier", "five": "fünf"}

SMALL = {
    "model.d_model": 16, "model.num_heads": 2, "model.dim_feedforward": 24,
    "tokenizer.kind": "word", "training.device": "cpu", "training.threads": 1,
    "training.tokens": 128, "training.steps": 4, "logging.every": 2, "evaluation.every": 4,
    "optimiser.warm_up": 4,
}  # fmt: skip


def run(*arguments, text=None):
    return CliRunner().invoke(
        app, list(map(str, arguments)), input=text, env={"COLUMNS": "200", "NO_COLOR": "1"}
    )


def settings(**more):
    given = {**SMALL, **{name.replace("__", "."): value for name, value in more.items()}}
    return [part for name, value in given.items() for part in ("--set", f"{name}={value}")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    rows = [draw.choices(list(WORDS), k=draw.randint(2, 5)) for _ in range(60)]
    pairs = [(" ".join(row), " ".join(WORDS[word] for word in row)) for row in rows]
    for name, part in (("train", pairs[:50]), ("valid", pairs[50:])):
        text = "".join(f"{a}\t{b}\n" for a, b in part)
        (folder / f"{name}.tsv").write_text(text, encoding="utf-8")
    with (folder / "train.tsv").open("a", encoding="utf-8") as file:
        file.write("no target\n")
    (folder / "lines.txt").write_text("".join(f"{b}\n" for _, b in pairs), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    layers = {"model__encoder_layers": 1, "model__decoder_layers": 1}
    options = ("--data", corpus / "train.tsv", "--valid", corpus / "valid.tsv", "--out", out)
    command = ("train", "translation", *options, *settings(**layers), "--json")
    return out, command, run(*command)


def test_training_reports_and_bad_lines_are_told(trained):
    out, _, result = trained
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["steps"] == 4 and report["stopped"] == "steps"
    assert any("1 left out: 1 columns, expected 2 (line 51)" in note for note in report["notes"])
    assert "step 2" in result.stderr and "left" in result.stderr
    assert (out / "best" / "model.safetensors").is_file()


def test_the_same_command_is_complete_and_another_is_refused(trained):
    out, command, _ = trained
    again = run(*command)
    assert again.exit_code == 0 and "complete" in again.stderr
    alone = run("train", "translation", "--out", out)
    assert alone.exit_code == 0 and "best (step" in alone.stdout, "its own recipe is there"
    other = run(*command, "--set", "model.mechanism=softmax", "--set", "model.dropout=0.5")
    assert other.exit_code == 2
    assert "model.dropout: 0.3 there, 0.5 now" in other.stderr


def test_translations_come_in_the_order_of_the_lines(trained, corpus, tmp_path):
    out, _, _ = trained
    texts = ["two one", "", "five five five five"]
    piped = run("translate", out, text="\n".join(texts) + "\n")
    assert piped.exit_code == 0, piped.output
    assert len(piped.stdout.split("\n")) == 4 and piped.stdout.split("\n")[1] == ""
    assert "empty text: line 2" in piped.stderr
    table = tmp_path / "new.tsv"
    table.write_text("".join(f"x\t{text}\n" for text in texts), encoding="utf-8")
    saved = tmp_path / "new.txt"
    result = run("translate", out, table, "--column", 2, "--out", saved)
    assert result.exit_code == 0 and saved.read_text(encoding="utf-8") == piped.stdout


def test_n_best_and_alignment(trained):
    out, _, _ = trained
    options = ("--n-best", 2, "--beams", 3, "--alignment")
    plain = run("translate", out, *options, text="two one\nfive\n")
    rows = [line.split("\t") for line in plain.stdout.splitlines()]
    assert [row[0] for row in rows] == ["1", "1", "2", "2"] and all(len(row) == 4 for row in rows)
    assert float(rows[0][1]) >= float(rows[1][1])
    result = run("translate", out, *options, "--json", text="two one\nfive\n")
    found = json.loads(result.stdout)
    assert [one["source"] for one in found] == ["two one", "five"]
    first = found[0]["translations"][0]
    assert first["text"] == rows[0][2] and len(first["alignment"]) == len(first["tokens"])


def test_draws_belong_to_their_seed(trained):
    out, _, _ = trained
    options = ("--sample", "--temperature", 2.0, "--top-k", 9, "--n-best", 3, "--json")

    def drawn(seed):
        result = run("translate", out, *options, "--seed", seed, text="two one five four\n")
        assert result.exit_code == 0, result.output
        return [one["text"] for one in json.loads(result.stdout)[0]["translations"]]

    first = drawn(1)
    assert drawn(1) == first != drawn(2)
    assert len(set(first)) > 1, "not a search's best, three times"


def test_a_model_that_writes_all_at_once_takes_its_passes(corpus, tmp_path):
    options = settings(model__encoder_layers=1, model__decoder_layers=1)
    data = ("--data", corpus / "train.tsv", "--valid", corpus / "valid.tsv")
    result = run("train", "nat", *data, "--out", tmp_path / "run", *options)
    assert result.exit_code == 0, result.output
    for passes in (1, 3):
        given = ("--iterations", passes, "--beams", 2, "--n-best", 2)
        result = run("translate", tmp_path / "run", *given, text="two one\n")
        assert result.exit_code == 0 and result.stdout.count("\n") == 2
    result = run("translate", tmp_path / "run", "--sample", text="two one\n")
    assert result.exit_code == 2 and "it writes all tokens at once" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--top-k", 3), "--temperature, --top-k and --top-p need --sample"),
        (("--sample", "--beams", 3), "--sample draws and --beams searches"),
        (("--sample", "--top-p", 0), "top_p=0"),
        (("--iterations", 3), "models that write all tokens at once"),
        (("--n-best", 9), "--n-best 9 needs --beams 9"),
        (("--device", "nowhere"), "--device='nowhere' is not there"),
    ],
)
def test_ways_to_decode_that_cannot_be(trained, options, message):
    result = run("translate", trained[0], *options, text="two\n")
    assert result.exit_code == 2 and message in " ".join(result.stderr.split())


def test_a_language_model_goes_on_with_a_text(corpus, tmp_path):
    options = settings(model__num_layers=1, data__max_length=16, model__mechanism="performer")
    data = ("--data", corpus / "lines.txt")
    result = run("train", "lm", *data, "--out", tmp_path / "run", *options)
    assert result.exit_code == 0, result.output
    assert "perplexity" in result.stdout
    greedy = run("generate", tmp_path / "run", "eins zwei", "--tokens", 5)
    assert greedy.exit_code == 0 and greedy.stdout.startswith("eins zwei")
    drawn = (
        "generate",
        tmp_path / "run",
        "eins",
        "--sample",
        "--top-p",
        0.9,
        "--count",
        3,
        "--json",
    )
    first, second = (json.loads(run(*drawn, "--seed", 1).stdout) for _ in range(2))
    assert first == second and len(first["texts"]) == 3


# ---- score ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outputs")
    draw = random.Random(1)
    lines = [[str(draw.randrange(30)) for _ in range(12)] for _ in range(40)]

    def damaged(share):
        return [[w if draw.random() > share else "x" for w in line] for line in lines]

    for name, rows in (("ref", lines), ("good", damaged(0.05)), ("bad", damaged(0.4))):
        text = "".join(" ".join(row) + "\n" for row in rows)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_scores_are_sacrebleu_s(outputs):
    result = run("score", outputs / "good", outputs / "ref", "--ter", "--json")
    assert result.exit_code == 0, result.output
    (system,) = json.loads(result.stdout)["systems"]
    lines = {name: (outputs / name).read_text().splitlines() for name in ("good", "ref")}
    wanted = [
        metric(lines["good"], [lines["ref"]]).score
        for metric in (sacrebleu.corpus_bleu, sacrebleu.corpus_chrf, sacrebleu.corpus_ter)
    ]
    assert [one["score"] for one in system["scores"]] == wanted
    assert all("version:" in one["signature"] for one in system["scores"])
    assert "low" not in system["scores"][0]


def test_intervals_and_paired_tests(outputs):
    files = (outputs / "good", outputs / "bad", outputs / "good", outputs / "ref")
    options = ("--confidence", "--samples", 60)
    result = run("score", *files[:2], files[3], *options, "--json")
    good, bad = (one["scores"][0] for one in json.loads(result.stdout)["systems"])
    assert good["low"] < good["score"] < good["high"]
    assert bad["high"] < good["low"] and "p" not in good
    # The smallest p-value of 60 samples is 1/61: none of them was as far off by chance.
    assert bad["p"] == pytest.approx(1 / 61)
    shown = run("score", *files[:2], files[3], *options)
    assert "p = 0.01" in shown.stdout and "seed:" in shown.stdout


# ---- errors --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "translate", "--out", "x"), "did you mean 'translation'?"),
        (("train", "translation", "--out", "x"), "data.train: give a file of pairs (--data)"),
        (("train", "lm", "--out", "x"), "data.train: give a text file"),
        (("train", "lm", "--out", "x", "--config", "bible-es-en"), "is a recipe for translation"),
        (("train", "lm", "--out", "x", "--config", "nothing"), "no such file, and none of"),
        (("train", "lm", "--out", "x", "--set", "model.mechanism"), "expected key=value"),
        (("train", "lm", "--out", "x", "--set", "model.depth=3"), "model.depth: unknown key"),
        (
            ("train", "lm", "--out", "x", "--set", "tokenizer.vocab_size=9", "--set", "a=1"),
            "a: unknown key - tokenizer.vocab_size=9 must be ≥ 261 with kind=bpe",
        ),
        (
            ("train", "lm", "--out", "x", "--set", "data.train=5"),
            "1 problem - data.train=5 must be",
        ),
        (("train", "lm", "--data", "a", "--out", "/dev/null/x"), "/dev/null/x: Not a directory"),
        (("translate", "."), "holds no model"),
        (("generate", ".", "--top-p", "0.5"), "need --sample"),
        (("score", "one"), "give two files or more"),
        (("score", "one", "two"), "no such file"),
    ],
)
def test_errors_have_one_message_and_code_2(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments, text="one\n")
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split()) and "Traceback" not in result.output


def test_a_file_or_column_that_is_not_there(trained, corpus):
    out, _, _ = trained
    result = run("translate", out, "nowhere.txt")
    assert result.exit_code == 2 and "nowhere.txt: no such file" in result.stderr
    result = run("translate", out, corpus / "valid.tsv", "--column", 3)
    assert result.exit_code == 2 and "line 1: column 3 of 2 columns" in result.stderr
    result = run("translate", out, corpus / "valid.tsv", "--out", out / "nowhere/new.txt")
    assert result.exit_code == 2 and "in a folder that there is" in result.stderr
    result = run("translate", out, text=b"one\n\xff\n")
    assert result.exit_code == 2 and "-, line 2: not UTF-8" in result.stderr


def test_a_model_of_another_kind_is_refused_in_one_line(trained):
    result = run("generate", trained[0])
    assert result.exit_code == 2 and "Seq2SeqTransformerConfig" in result.stderr
    assert "does not hold a language model" in result.stderr
    assert result.stderr.count("\n") == 1, "without the list of all kinds of models"


def test_files_of_different_lengths_are_not_scored(outputs, tmp_path):
    short = tmp_path / "short"
    short.write_text("a\n")
    result = run("score", short, outputs / "ref")
    assert result.exit_code == 2 and "has 1 lines" in result.stderr and "has 40" in result.stderr


def test_an_interrupted_run_says_how_it_goes_on(corpus, tmp_path, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("subquad.training.run.train", interrupted)
    result = run("train", "translation", "--data", corpus / "train.tsv", "--out", tmp_path)
    assert result.exit_code == 130 and "the same command goes on" in result.stdout


def test_a_missing_extra_is_named(outputs, monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics.bleu", None)
    result = run("score", outputs / "good", outputs / "ref")
    assert result.exit_code == 2 and "pip install 'subquad[train]'" in result.stderr


def test_help_flows_into_the_width_there_is():
    text = run("translate", "--help").stdout  # 200 columns
    assert "lines are number, score and text; with --alignment" in text, "one line, as it fits"


@pytest.mark.parametrize("verb", ["train", "translate", "generate", "score"])
def test_help_has_an_example(verb):
    result = run(verb, "--help")
    assert result.exit_code == 0 and f"Example: subquad {verb}" in result.stdout
