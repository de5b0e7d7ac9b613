"""A tokenizer of words, and small models, shared by the tests of decoding."""

import torch

import subquad as sq

SIGNS = ("<pad>", "<s>", "</s>", "<unk>", "<mask>")


def word_tokenizer(words):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate([*SIGNS, *words])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing("$A </s>", None, [("</s>", 2)])
    names = ("pad_token", "bos_token", "eos_token", "unk_token", "mask_token")
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, **dict(zip(names, SIGNS, strict=True)), padding_side="right"
    )


def small(kind="Seq2SeqTransformer", vocabulary=40, **options):
    config = getattr(sq.models, f"{kind}Config")(
        **{
            "vocab_size": vocabulary, "d_model": 32, "num_heads": 2, "dim_feedforward": 32,
            "encoder_layers": 1, "decoder_layers": 1, "mechanism": "softmax", "dropout": 0.0,
            **options,
        }
    )  # fmt: skip
    torch.manual_seed(3)
    return getattr(sq.models, kind)(config).eval()


def loud(model, seed=5):
    """Weights so large that the outputs of an untrained model differ from text to text."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model
