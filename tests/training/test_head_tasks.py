"""Classification, tagging and question answering: small tasks that have to be learned."""

import json
import random
import subprocess
import sys

import pytest
import torch
import transformers

from subquad.data.labelled import Questions, Tagged
from subquad.data.tokens import train_tokenizer
from subquad.errors import OptionError
from subquad.training.recipe import Recipe
from subquad.training.run import train
from subquad.training.tasks import qa, tag
from subquad.training.tasks.heads import HeadLoss, Rows, label_names, predictions

WORDS = [f"w{i}" for i in range(30)]
FIRST, LAST, CITY = (["Ada", "Alan"], ["Lovelace", "Turing"], ["Rome", "Oslo"])


def texts_with_labels(count, draw):
    """The label is said by one word of the text."""
    for _ in range(count):
        words = draw.choices(WORDS, k=draw.randint(5, 20))
        label = draw.choice(["fruit", "tool"])
        words[draw.randrange(len(words))] = {"fruit": "apple", "tool": "hammer"}[label]
        yield f"{' '.join(words)}\t{label}"


def sentences_with_names(count, draw):
    for _ in range(count):
        rows = []
        for _ in range(draw.randint(1, 4)):
            rows += draw.choice(
                [
                    [(draw.choice(FIRST), "B-PER"), (draw.choice(LAST), "I-PER")],
                    [(draw.choice(CITY), "B-LOC")],
                    [(draw.choice(WORDS), "O")],
                ]
            )
        yield "\n".join(" ".join(row) for row in rows) + "\n"


def questions_about_names(count, draw):
    for _ in range(count):
        words = draw.choices(WORDS, k=draw.randint(3, 6))
        who, where = draw.choice(FIRST), draw.choice(CITY)
        for name in (who, where):
            words.insert(draw.randrange(1, len(words)), name)
        asked, answer = draw.choice([("who", who), ("where", where)])
        context = " ".join(words)
        start = context.index(answer)
        yield json.dumps({"context": context, "question": asked, "answer": answer, "start": start})


def texts_with_summaries(count, draw):
    """The summary is the names that the text holds, in their order."""
    for _ in range(count):
        words = draw.choices(WORDS[:10], k=draw.randint(2, 5))
        words.insert(draw.randrange(len(words)), draw.choice(FIRST))
        words.append(draw.choice(CITY))
        yield f"{' '.join(words)}\t{' '.join(w for w in words if w[0] in 'ARO')}"


MAKERS = {
    "classify": ("a.tsv", texts_with_labels, 200),
    "tag": ("a.conll", sentences_with_names, 200),
    "qa": ("a.jsonl", questions_about_names, 400),
    "summarise": ("a.tsv", texts_with_summaries, 300),
}
TINY = {
    "model.d_model": 32,
    "model.num_heads": 2,
    "model.dim_feedforward": 64,
    "model.dropout": 0.0,
    "tokenizer.kind": "word",
    "optimiser.warm_up": 10,
    "optimiser.rate": 5e-3,
    "training.tokens": 512,
    "training.epochs": 4,
    "training.threads": 1,
    "model.mechanism": "softmax",
}
LAYERS = {
    "classify": {"model.num_layers": 2},
    "tag": {"model.num_layers": 2},
    "qa": {"model.num_layers": 2},
    "summarise": {"model.encoder_layers": 1, "model.decoder_layers": 1},
}


def corpus(task, folder):
    name, make, count = MAKERS[task]
    path = folder / name
    path.write_text("\n".join(make(count, random.Random(0))) + "\n", encoding="utf-8")
    return path


def run(task, folder, **overrides):
    path = corpus(task, folder)
    recipe = Recipe.load(task, {**TINY, **LAYERS[task], "data.train": str(path), **overrides})
    return train(recipe, folder / "run")


# ---- they learn ------------------------------------------------------------------------------


def test_texts_are_classified(tmp_path):
    report = run("classify", tmp_path, **{"model.mechanism": "performer(features=32)"})
    # 20 held-out texts; whoever has not found the word is right in 10 ± 2 of them
    assert report.best["accuracy"] > 0.9 and report.best["f1"] > 0.9
    best = tmp_path / "run" / "best"
    pipe = transformers.pipeline("text-classification", model=str(best), device="cpu")
    found = pipe(["w1 w2 apple w3", "hammer w5"])
    assert [one["label"] for one in found] == ["fruit", "tool"]


def test_words_are_tagged(tmp_path):
    report = run("tag", tmp_path, **{"evaluation.best": "f1"})
    # most words are "O" or drawn from six names: guessing has no span right
    assert report.best["f1"] > 0.9 and report.best["accuracy"] > 0.9
    model = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "run" / "best")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "best")
    ids, first = tag.align(tokenizer, ["Alan", "Turing", "w3", "Rome"])
    labels = model.eval()(torch.tensor([ids])).logits[0].argmax(-1).tolist()
    found = [model.config.id2label[label] for label, word in zip(labels, first, strict=True)
             if word is not None]  # fmt: skip
    assert found == ["B-PER", "I-PER", "O", "B-LOC"]


def test_questions_are_answered(tmp_path):
    report = run("qa", tmp_path, **{"training.epochs": 6})
    # each text holds both a person and a city: whoever does not read the question gets a half
    assert report.best["exact"] > 0.9 and report.best["f1"] >= report.best["exact"]


def test_texts_are_summarised(tmp_path):
    options = {"objective.label_smoothing": 0.0, "training.epochs": 10, "evaluation.every": 100}
    report = run("summarise", tmp_path, **options)
    # the names are two of four: whoever writes the same ones always has a half of the words,
    # and a quarter of the pairs
    assert report.best["rouge1"] > 0.8 and report.best["rouge2"] > 0.5, report.best
    assert report.best["rougeL"] <= report.best["rouge1"]


@pytest.mark.slow  # four processes that import transformers
@pytest.mark.parametrize("task", MAKERS)
def test_the_command_trains(tmp_path, task):
    options = [f"--set={name}={value}" for name, value in {**TINY, **LAYERS[task]}.items()]
    done = subprocess.run(
        [sys.executable, "-c", "from subquad.cli import main; main()", "train", task,
         "--data", str(corpus(task, tmp_path)), "--out", str(tmp_path / "run"), "--json",
         "--set=training.epochs=1", *[o for o in options if "epochs" not in o]],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["task"] == task and (tmp_path / "run" / "best" / "model.safetensors").is_file()


# ---- their parts -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pieces():
    """A tokenizer that cuts words: bytes and few merges."""
    return train_tokenizer(["Ada counts in Rome"] * 3, vocab_size=262)


def test_a_word_is_tagged_by_its_first_piece(pieces):
    ids, first = tag.align(pieces, ["Ada", "in"])
    assert len(ids) > 3 and [word for word in first if word is not None] == [0, 1]
    assert first[0] == 0 and first[-1] is None
    assert first[len(pieces(["Ada"], is_split_into_words=True)["input_ids"]) - 1] == 1
    short, cut = tag.align(pieces, ["Ada", "in"], 3)
    assert len(short) == 3 and cut == [0, None, None]


def test_long_sentences_are_cut_left_out_or_refused(pieces, tmp_path):
    path = tmp_path / "a.conll"
    path.write_text("in O\n\nRome X\ncounts Y\n", encoding="utf-8")
    sentences = Tagged.open(path)
    names = label_names(["O", "X"], ["Y", "X"], notes := [])
    assert names == ["O", "X", "Y"] and notes == ["labels of data.valid that data.train lacks: Y"]
    kept, problems = tag.encoded(sentences, pieces, names, 4, "drop")
    assert len(kept) == 1 and "longer than 4 tokens (line 3)" in str(problems)
    kept, problems = tag.encoded(sentences, pieces, names, 4, "truncate")
    assert kept.words_of == [(0, [0]), (1, [0])] and problems.total == 0
    assert kept.batch([0, 1])["labels"].tolist()[1] == [1, -100, -100, -100]
    with pytest.raises(OptionError, match="longer than 4 tokens"):
        tag.encoded(sentences, pieces, names, 4, "raise")
    with pytest.raises(OptionError, match="one label, O"):
        label_names(["O"], ["O"], [])


def test_windows_hold_the_answer_or_say_that_they_do_not(pieces, tmp_path):
    context = "counts in Rome " * 4 + "Ada"
    asked = {"context": context, "question": "who", "answer": "Ada", "start": len(context) - 3}
    too_long = {**asked, "question": "who " * 30}
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(asked) + "\n" + json.dumps(too_long), encoding="utf-8")
    rows, problems = qa.windows(Questions.open(path), pieces, 40)
    assert len(rows) > 1 and int(rows.lengths.max()) <= 40
    assert str(problems) == "1 left out: question longer than 20 tokens (line 2)"
    found = []
    for row, (place, own) in zip(rows.rows, rows.origins, strict=True):
        assert place == 0 and len(own) == len(row["input_ids"])
        first, last = own[row["start_positions"]], own[row["end_positions"]]
        if first is None:  # the question's end
            assert row["input_ids"][row["start_positions"]] == pieces.eos_token_id
        else:
            found.append(context[first[0] : last[1]].strip())
        kinds = torch.tensor(row["token_type_ids"])
        assert kinds[0] == 0 and kinds[-1] == 1 and (kinds.diff() >= 0).all()
    assert "Ada" in found and set(found) == {"Ada"}
    covered = {c for _, own in rows.origins for span in own if span for c in range(*span)}
    assert covered == set(range(len(context)))  # no character is in no window


def test_the_best_span_is_the_best_of_all():
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        start, end = torch.randn(2, 13, generator=draw)
        inside = torch.rand(13, generator=draw) > 0.3
        score, first, last = qa.best_span(start, end, inside, longest=4)
        every = {
            float(start[i] + end[j]): (i, j)
            for i in range(13)
            for j in range(i, min(i + 4, 13))
            if inside[i] and inside[j]
        }
        assert every[score] == (first, last) and score == max(every)


def test_the_loss_is_the_models_own_and_smoothing_is_torchs():
    class Model(torch.nn.Module):
        def forward(self, x, labels=None):
            loss = None if labels is None else torch.nn.functional.cross_entropy(x, labels)
            return type("Out", (), {"logits": x, "loss": loss})

    x, labels = torch.randn(5, 3), torch.tensor([0, 1, 2, 1, -100])
    batch = {"x": x, "labels": labels}
    plain = HeadLoss()(Model(), batch, 0.0).total
    torch.testing.assert_close(plain, torch.nn.functional.cross_entropy(x, labels))
    smooth = HeadLoss(0.2)(Model(), batch, 0.0)
    logs = x.log_softmax(-1)[:4]
    by_hand = -(0.8 * logs.gather(1, labels[:4, None])[:, 0] + 0.2 * logs.mean(1)).mean()
    torch.testing.assert_close(smooth.total, by_hand)
    assert sorted(smooth.parts) == ["cross_entropy", "penalties"]
    with pytest.raises(OptionError, match="label_smoothing=2 must .*; penalties=-1 must"):
        HeadLoss(2, penalties=-1)


def test_predictions_come_once_for_each_row():
    class Model(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, input_ids, attention_mask):
            return (input_ids * attention_mask).sum(1)

    rows = Rows([{"input_ids": [5] * size} for size in (3, 9, 1, 7)], pad=8)
    found = {
        index: int(out[place])
        for indices, _, out in predictions(Model(), rows, rows.batch, 10)
        for place, index in enumerate(indices)
    }
    assert found == {0: 15, 1: 45, 2: 5, 3: 35}


def test_recipes_that_do_not_fit_are_refused():
    with pytest.raises(OptionError) as caught:
        Recipe.load("qa", {"data.max_length": 600, "data.preset": "bible-es-en"})
    assert "data.max_length=600 is longer than model.max_position_embeddings=512" in str(
        caught.value
    )
    assert "data.preset='bible-es-en'" in str(caught.value)
    with pytest.raises(OptionError, match="objective.feeding: unknown key for tag"):
        Recipe.load("tag", {"objective.feeding": "teacher"})
    with pytest.raises(OptionError, match="evaluation.best='rouge1' needs evaluation.decode"):
        Recipe.load("summarise", {"evaluation.best": "rouge1", "evaluation.decode": 0})
    for task in MAKERS:
        assert Recipe.load(task).task == task
