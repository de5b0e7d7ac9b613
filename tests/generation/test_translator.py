"""`Translator`: order, batches, limits, notes, n-best, scores; transformers' models alike."""

import itertools

import pytest
import torch

import subquad as sq
from generation.helpers import loud, small, word_tokenizer
from subquad.errors import OptionError, UnsupportedError

tf = pytest.importorskip("transformers")

from subquad.generation import (  # noqa: E402
    LogitsNoise,
    Sampling,
    Translator,
    WordDropout,
    distil,
)

WORDS = [f"w{number}" for number in range(35)]
TEXTS = ["w1 w2 w3", "w4", "", "w5 zz w6 w7 w8 w9", " ".join(WORDS[:30]), "  ", "w2 w1"]


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer(WORDS)


def marian():
    config = tf.MarianConfig(
        vocab_size=40, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=0, forced_eos_token_id=None,
        max_position_embeddings=16,
    )  # fmt: skip
    torch.manual_seed(1)
    return loud(tf.MarianMTModel(config).eval())


def t5():
    config = tf.T5Config(
        vocab_size=40, d_model=32, d_kv=16, num_layers=1, num_heads=2, d_ff=32, pad_token_id=0,
        eos_token_id=2, decoder_start_token_id=0,
    )  # fmt: skip
    torch.manual_seed(1)
    return loud(tf.T5ForConditionalGeneration(config).eval())


MODELS = {
    "performer": lambda: loud(small(mechanism="performer")),
    "parallel": lambda: loud(small("NonAutoregressiveTransformer")),
    "marian": marian,
    "t5": t5,
}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return MODELS[request.param]()


def own(model):
    return isinstance(model, sq.models.Seq2SeqTransformer)


def test_each_text_gets_what_it_gets_alone(model, tokenizer):
    translator = Translator(model, tokenizer, beams=3, n_best=2, batch_tokens=24)
    together = translator.translate(TEXTS)
    alone = [translator.translate([text])[0] for text in TEXTS]
    for one, other in zip(together, alone, strict=True):
        assert [h.text for h in one.n_best] == [h.text for h in other.n_best]
        # float32 sums in another order: 1e-5 is 100 roundings of numbers of about 1
        torch.testing.assert_close(
            [h.score for h in one.n_best], [h.score for h in other.n_best], atol=1e-5, rtol=1e-5
        )
        assert one.notes == other.notes
    full = [h for h in together if h.notes != ("empty text",)]
    assert len(full) == len(TEXTS) - 2
    assert len({h.text for h in full}) > 1, "outputs differ from text to text"
    assert all(len(h.n_best) == 2 and h.score >= h.others[0].score for h in full)


def test_notes_say_what_happened(model, tokenizer):
    translator = Translator(model, tokenizer, beams=2, max_length=4)
    found = translator.translate(TEXTS)
    report = translator.report(found)
    assert report["empty text"] == [3, 6]
    assert report["unknown tokens in the source"] == [4]
    assert all(len(h.tokens) <= 4 for h in found)
    limited = getattr(model.config, "max_position_embeddings", None) == 16
    assert report.get("source cut", []) == ([5] if limited else [])
    if limited:
        assert "source cut: 31 tokens to 16" in found[4].notes


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_scores_are_log_probabilities(tokenizer, penalty):
    model = marian()
    text = "w1 w2 w3"
    best = Translator(model, tokenizer, beams=4, length_penalty=penalty, n_best=3, max_length=6)
    found = best.translate([text])[0].n_best
    theirs = model.generate(
        torch.tensor([tokenizer(text)["input_ids"]]), num_beams=4, num_return_sequences=3,
        length_penalty=penalty, max_new_tokens=7, return_dict_in_generate=True,
        output_scores=True,
    )  # fmt: skip
    for at, hypothesis in enumerate(found):
        row = [token for token in theirs.sequences[at, 1:].tolist() if token > 2]
        if len(row) > 6:
            continue  # cut by their limit, which has no end
        assert hypothesis.tokens == tuple(tokenizer.convert_ids_to_tokens(row))
        # sums of ≤ 7 float32 logarithms: 7 roundings of numbers < 30
        assert abs(hypothesis.score - float(theirs.sequences_scores[at])) < 2e-5


def test_beams_as_wide_as_all_sequences_find_the_best_one():
    """With V^L beams nothing is pruned: the search is exhaustive."""
    vocabulary, longest = 6, 3
    source = torch.tensor([[5, 5, 3, 2]])
    body = [0, 1, 3, 4, 5]
    every = [
        *((*head, 2) for size in range(longest) for head in itertools.product(body, repeat=size)),
        *itertools.product(body, repeat=longest),  # without an end
    ]
    better = 0
    for seed, penalty in itertools.product(range(5), (0.0, 1.0)):
        model = loud(small(vocabulary=vocabulary), seed).double()
        scores = {ids: log_p(model, source, ids) / len(ids) ** penalty for ids in every}
        best = max(scores, key=scores.__getitem__)
        wide, narrow = (
            model.generate(source, num_beams=beams, max_new_tokens=longest, **options)[0].tolist()
            for beams, options in ((vocabulary**longest, {"length_penalty": penalty}), (1, {}))
        )
        assert tuple(wide[1:][: len(best)]) == best
        assert set(wide[1 + len(best) :]) <= {0}
        found = tuple(narrow[1 : narrow.index(2) + 1] if 2 in narrow else narrow[1:])
        better += scores[best] > scores[found] + 1e-9
    assert better, "greedy search misses the best output of some model"


def log_p(model, source, ids):
    with torch.no_grad():
        given = torch.tensor([[1, *ids[:-1]]])
        logs = model(source, decoder_input_ids=given).logits.log_softmax(-1)[0]
    return float(logs[torch.arange(len(ids)), torch.tensor(ids)].sum())


def test_a_draw_belongs_to_its_seed(tokenizer):
    model = loud(small(mechanism="performer"))

    def draw(**options):
        found = Translator(model, tokenizer, n_best=3, sampling=Sampling(**options)).translate(
            TEXTS
        )
        return [one.text for h in found for one in h.n_best]

    before = torch.get_rng_state()
    assert draw(seed=1) == draw(seed=1)
    assert torch.equal(before, torch.get_rng_state()), "the caller's random state stays"
    assert draw(seed=1) != draw(seed=2)
    greedy = [h.text for h in Translator(model, tokenizer, beams=1).translate(TEXTS)]
    cold = Sampling(top_k=1)
    found = Translator(model, tokenizer, sampling=cold).translate(TEXTS)
    assert [h.text for h in found] == greedy


def test_noise_on_logits_and_on_the_source(tokenizer):
    model = loud(small())
    plain = [h.text for h in Translator(model, tokenizer, beams=1).translate(TEXTS)]

    def noisy(**options):
        found = Translator(model, tokenizer, beams=1, **options).translate(TEXTS)
        return [h.text for h in found]

    assert noisy(processors=[LogitsNoise(0.0)]) == plain
    assert noisy(processors=[LogitsNoise(5.0, seed=1)]) != plain
    assert noisy(source_noise=WordDropout(0.0)) == plain
    dropped = noisy(source_noise=WordDropout(0.5, seed=4))
    assert dropped != plain
    assert dropped == noisy(source_noise=WordDropout(0.5, seed=4), batch_tokens=1)


def test_unknown_tokens_of_the_output_are_kept_or_replaced(tokenizer):
    model, text = loud(small()), "w1 w2 w3"

    def second_is_unknown(ids, scores):
        if ids.shape[1] != 2:
            return scores
        only = torch.full_like(scores, float("-inf"))
        only[:, tokenizer.unk_token_id] = 0.0
        return only

    kept, replaced = (
        Translator(
            model, tokenizer, beams=1, max_length=3, replace_unknown=on, alignment=True,
            processors=[second_is_unknown],
        ).translate([text])[0]
        for on in (False, True)
    )  # fmt: skip
    words = kept.text.split()
    assert words[1] == "<unk>"
    looked = {target: source for source, target in kept.alignment.pairs()}
    words[1] = text.split()[looked[1]]
    assert replaced.text.split() == words


def test_wrong_arguments_are_told_together(tokenizer):
    model = small()
    with pytest.raises(OptionError, match="beams=0.*n_best=-1.*max_length"):
        Translator(model, tokenizer, beams=0, n_best=-1, max_length=(1, "x"))
    with pytest.raises(OptionError, match="n_best=3 needs as many beams"):
        Translator(model, tokenizer, beams=2, n_best=3)
    with pytest.raises(OptionError, match="no method generate"):
        Translator(torch.nn.Linear(2, 2), tokenizer)
    with pytest.raises(OptionError, match="one string"):
        Translator(model, tokenizer).translate("w1")
    with pytest.raises(UnsupportedError, match="all tokens at once"):
        Translator(small("NonAutoregressiveTransformer"), tokenizer, sampling=Sampling())
    with pytest.raises(OptionError, match="temperature=0.*top_p=2"):
        Sampling(temperature=0, top_p=2)


def test_distilled_targets_are_the_teachers_and_resume(tokenizer, tmp_path):
    model = loud(small())
    path = tmp_path / "distilled.tsv"
    sources = [text for text in TEXTS if text.strip()] * 3
    whole = distil(model, tokenizer, sources, path, beams=2, max_length=6, save_every=4)
    assert (whole.lines, whole.resumed) == (15, 0)
    assert whole.notes["unknown tokens in the source"] == [3, 8, 13]
    wanted = Translator(model, tokenizer, beams=2, max_length=6).translate(sources)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines == [f"{s}\t{h.text}" for s, h in zip(sources, wanted, strict=True)]
    complete = path.read_bytes()
    path.write_bytes(complete[: len(complete) // 2])  # stopped within a line
    again = distil(model, tokenizer, sources, path, beams=2, max_length=6)
    assert path.read_bytes() == complete
    assert 0 < again.resumed < again.lines == 15
    with pytest.raises(OptionError, match="line 1 .* another source"):
        distil(model, tokenizer, ["w9"], path, beams=2)


def test_noise_makes_no_text_an_empty_one(tokenizer):
    noise = WordDropout(1.0, replacement=tokenizer.mask_token_id)
    translator = Translator(loud(small()), tokenizer, beams=1, source_noise=noise)
    one, nothing = translator.translate(["w4", ""])
    assert one.tokens and "empty text" not in one.notes
    assert nothing.notes == ("empty text",)
