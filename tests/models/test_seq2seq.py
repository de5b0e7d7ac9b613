"""`Seq2SeqTransformer`: torch's layers, memories by hand, padding, what transformers does."""

import copy
import math
import pickle

import pytest
import torch
import torch._dynamo.testing
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

import subquad as sq
from subquad.attention.base import Mechanism
from subquad.data.batches import pad_batch
from subquad.errors import DtypeError, OptionError, ShapeError, UnsupportedError
from subquad.models.seq2seq import DECODER_SEED

B, S, L, C, H, V, HIDDEN = 3, 11, 7, 21, 3, 17, 13
EPS = torch.finfo(torch.float64).eps
FORWARD, BACKWARD = 12, 76  # of a layer, derived in tests/attention/test_layers.py
PERFORMER = "performer(features=8)"


def config(mechanism=PERFORMER, **options):
    options = {"d_model": 24, "num_heads": 4, "dropout": 0.0, **options}
    options = {"encoder_layers": 3, "decoder_layers": 2, **options}
    return sq.models.Seq2SeqTransformerConfig(
        vocab_size=V, dim_feedforward=HIDDEN, mechanism=mechanism, **options
    )


def model(mechanism=PERFORMER, **options):
    torch.manual_seed(0)
    return sq.models.Seq2SeqTransformer(config(mechanism, **options)).eval()


def ids(length=S, seed=0, low=5, high=V):
    return torch.randint(low, high, (B, length), generator=torch.Generator().manual_seed(seed))


def padded(length=S, side="right", seed=0):
    """Rows of full length, three less and three tokens, with their mask."""
    sizes, places = torch.tensor([length, length - 3, 3]), torch.arange(length)
    kept = places < sizes[:, None] if side == "right" else places >= length - sizes[:, None]
    return ids(length, seed).masked_fill(~kept, 0), kept.long()


def batch(side="right"):
    source, mask = padded(S, side)
    labels, there = padded(L, seed=1)
    return {
        "input_ids": source,
        "attention_mask": mask,
        "labels": labels.masked_fill(there == 0, -100),
    }


def mechanisms(module):
    return [part for part in module.modules() if isinstance(part, Mechanism)]


# ---- torch's Transformer ---------------------------------------------------------------------


def torchs(norm_first, made):
    """torch's Transformer of the same sizes, random in every entry, with its weights in `made`."""
    sizes = {"batch_first": True, "norm_first": norm_first, "dtype": torch.float64}
    layer = nn.TransformerEncoderLayer(C, H, HIDDEN, 0.0, **sizes)
    encoder = nn.TransformerEncoder(layer, 3, nn.LayerNorm(C, dtype=torch.float64), False)
    theirs = nn.Transformer(C, H, 3, 2, HIDDEN, 0.0, custom_encoder=encoder, **sizes)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.uniform_(-0.5, 0.5, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(0.7)
    made.encoder.load_torch(theirs.state_dict(), "encoder.")
    made.decoder.load_torch(theirs.state_dict(), "decoder.")
    return theirs


def by_torch(theirs, table, made, given, reads=None):
    """Logits of torch's layers; `reads` makes the memory of each decoder layer of all layers'."""

    def vectors(tokens):
        places = torch.arange(tokens.shape[1])
        return F.embedding(tokens, table) * C**0.5 + made.encoder.positions(places, torch.float64)

    closed = given["attention_mask"] == 0
    inputs = made.prepare_decoder_input_ids_from_labels(given["labels"])
    future = torch.ones(L, L, dtype=torch.bool).triu(1)
    x, layers = vectors(given["input_ids"]), []
    for layer in theirs.encoder.layers:
        x = layer(x, src_key_padding_mask=closed)
        layers.append(theirs.encoder.norm(x))
    memories = [layers[-1]] * 2 if reads is None else reads(layers)
    y = vectors(inputs)
    for layer, memory in zip(theirs.decoder.layers, memories, strict=True):
        y = layer(y, memory, tgt_mask=future, memory_key_padding_mask=closed)
    return theirs.decoder.norm(y) @ table.mT


TORCH_NAMES = {  # one place of each kind, and both ends of the model
    "encoder.layers.0.self_attn.in_proj_weight": "encoder.blocks.0.attention.in_proj_weight",
    "encoder.layers.2.linear2.bias": "encoder.blocks.5.feed_forward.linear2.bias",
    "encoder.norm.weight": "encoder.norm.weight",
    "decoder.layers.0.self_attn.out_proj.weight": "decoder.blocks.0.attention.out_proj.weight",
    "decoder.layers.0.multihead_attn.in_proj_weight": "decoder.blocks.1.attention.in_proj_weight",
    "decoder.layers.1.linear1.weight": "decoder.blocks.5.feed_forward.linear1.weight",
    "decoder.layers.1.norm2.bias": "decoder.blocks.4.norm.bias",
    "decoder.norm.bias": "decoder.norm.bias",
}


@pytest.mark.parametrize("memory", ["last", "same_depth", [2, 0], "weighted"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_equals_torchs_transformer(norm_first, memory):
    """Forward and gradients; other memories by torch's layers, one by one."""
    made = model(
        "softmax", d_model=C, num_heads=H, norm_first=norm_first, final_norm=True, memory=memory
    ).double()
    theirs = torchs(norm_first, made)
    reads = None
    if memory == "weighted":
        with torch.no_grad():
            made.mix.weight.copy_(torch.randn(2, 3, generator=torch.Generator().manual_seed(3)))
        share = made.mix.weight.detach().softmax(-1)

        def reads(layers):
            return [sum(a * layer for a, layer in zip(row, layers, strict=True)) for row in share]
    elif memory != "last":
        chosen = [0, 1] if memory == "same_depth" else memory

        def reads(layers):
            return [layers[at] for at in chosen]

    given = batch()
    table = made.embed.weight.detach().clone().requires_grad_()
    wanted = by_torch(theirs, table, made, given, reads)
    found = made(**given)
    # Errors of five layers and both ends add. LayerMix takes its softmax in float32.
    rounding = EPS if memory != "weighted" else torch.finfo(torch.float32).eps
    error = (found.logits - wanted).abs().max() / wanted.abs().max()
    assert error <= 6 * FORWARD * rounding < 1e-5
    labels = given["labels"].flatten()
    right = F.cross_entropy(wanted.flatten(0, 1), labels)
    torch.testing.assert_close(found.loss, right, atol=0, rtol=1e-12)  # means of like sums
    right.backward()
    F.cross_entropy(found.logits.flatten(0, 1), labels).backward()
    ours, others = dict(made.named_parameters()), dict(theirs.named_parameters())
    pairs = {name: (ours[own].grad, others[name].grad) for name, own in TORCH_NAMES.items()}
    pairs["embed"] = (made.embed.weight.grad[1:], table.grad[1:])  # padding has no gradient
    for name, (got, truth) in pairs.items():
        if truth is None:  # an encoder layer that nobody reads
            assert memory == "same_depth" and name.startswith("encoder.layers.2") and got is None
            continue
        error = (got - truth).abs().max() / truth.abs().max()
        assert error <= 6 * BACKWARD * rounding, name


def test_the_plain_call_is_the_papers_formula():
    """The whole of torch.nn.Transformer.forward, in float32, to 1e-5."""
    made = model("softmax", d_model=C, num_heads=H, final_norm=True)
    theirs = torchs(False, made).float()
    given = batch()
    source, inputs = given["input_ids"], made.prepare_decoder_input_ids_from_labels(given["labels"])
    x, y = (
        made.embed(tokens) * math.sqrt(C) + made.encoder.positions(torch.arange(tokens.shape[1]))
        for tokens in (source, inputs)
    )
    closed = given["attention_mask"] == 0
    out = theirs(
        x, y, tgt_mask=torch.ones(L, L, dtype=torch.bool).triu(1),
        src_key_padding_mask=closed, memory_key_padding_mask=closed,
    )  # fmt: skip
    wanted = out @ made.embed.weight.mT
    found = made(**given).logits
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


# ---- what the config says --------------------------------------------------------------------


def test_each_attention_has_its_mechanism():
    made = model(
        mechanism=["linear", PERFORMER, "mixed(softmax*2, linear*2)"],
        decoder_mechanism={"default": "softmax", -1: PERFORMER},
        cross_mechanism="linear",
    )
    encoder = [mech.name for mech in mechanisms(made.encoder)]
    assert encoder == ["linear", "performer", "mixed", "softmax", "linear"]
    decoder = [mech.name for mech in mechanisms(made.decoder)]
    assert decoder == ["softmax", "linear", "performer", "linear"]
    made(**batch()).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in made.parameters())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("own", [None, 29])
def test_embeddings_are_shared_as_the_config_says(tied, own):
    made = model(tie_embeddings=tied, source_vocab_size=own)
    assert (made.head.weight is made.embed.weight) == tied
    assert (made.embed_source is None) == (own is None)
    source = ids(high=own or V)
    made(source, labels=ids(L)).loss.backward()
    used = made.embed.weight.grad.abs().sum(1) > 0
    if own is not None:
        assert made.embed_source.weight.shape == (own, 24)
        rows = made.embed_source.weight.grad.abs().sum(1).nonzero().flatten()
        assert rows.tolist() == source.unique().tolist()
    if not tied:
        read = made.prepare_decoder_input_ids_from_labels(ids(L))
        read = read if own is not None else torch.cat([read.flatten(), source.flatten()])
        assert used.nonzero().flatten().tolist() == read.unique().tolist()


@pytest.mark.parametrize("options", [
    {"positions": "rotary"},
    {"positions": "learned"},
    {"positions": None},
    {"positions_at": "attention"},
    {"norm": "rms", "norm_first": True, "activation": "swiglu", "feed_forward": "conv"},
    {"encoder_pattern": "aaf", "decoder_pattern": "accf"},
    {"mechanism": "softmax", "residual_attention": True},
    {"num_kv_heads": 2},
    {"memory": "weighted", "positions_at": "attention"},
    {"mechanism": "fnet", "decoder_mechanism": PERFORMER, "cross_mechanism": PERFORMER},
], ids=str)  # fmt: skip
def test_options_train_and_generate(options):
    made = model(**options)
    given = batch()
    if options.get("mechanism") == "fnet":  # it mixes padding in
        given["attention_mask"] = torch.ones_like(given["attention_mask"])
    made(**given).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in made.parameters())
    del given["labels"]
    found = [
        made.generate(**given, num_beams=2, max_new_tokens=4, use_cache=cached)
        for cached in (True, False)
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("options", [
    {}, {"positions": "learned"}, {"positions": "rotary"}, {"positions_at": "attention"},
    {"memory": "same_depth"}, {"mechanism": "softmax"},
], ids=str)  # fmt: skip
def test_a_padded_source_gives_what_it_gives_alone(options, side):
    made = model(**options)
    given = batch(side)
    inputs = made.prepare_decoder_input_ids_from_labels(given.pop("labels"))
    with torch.no_grad():
        found = made(**given, decoder_input_ids=inputs).logits
        for row in range(B):
            alone = given["input_ids"][row, given["attention_mask"][row] == 1]
            wanted = made(alone[None], decoder_input_ids=inputs[row : row + 1]).logits[0]
            torch.testing.assert_close(found[row], wanted, atol=1e-4, rtol=1e-4)


def test_a_left_padded_prefix_of_the_target_is_continued_as_alone():
    made = model()
    source = ids()
    inputs, mask = padded(L, "left", seed=1)
    with torch.no_grad():
        found = made(source, decoder_input_ids=inputs, decoder_attention_mask=mask).logits
        cache = sq.models.StackCache()
        encoded = made.encode(source)
        steps = [
            made(
                encoder_outputs=encoded, decoder_input_ids=inputs[:, at : at + 1],
                decoder_attention_mask=mask[:, : at + 1], past_key_values=cache,
            ).logits
            for at in range(L)
        ]  # fmt: skip
        for row in range(B):
            kept = mask[row] == 1
            alone = made(source[row : row + 1], decoder_input_ids=inputs[row, kept][None]).logits[0]
            torch.testing.assert_close(found[row, kept], alone, atol=1e-4, rtol=1e-4)
            streamed = torch.cat(steps, 1)[row, kept]
            torch.testing.assert_close(streamed, alone, atol=1e-4, rtol=1e-4)


def test_wrong_calls_are_named():
    made = model()
    given = batch()
    with pytest.raises(OptionError, match="one of input_ids, inputs_embeds, input_features"):
        made(labels=given["labels"])
    with pytest.raises(
        OptionError, match="give decoder_input_ids, decoder_inputs_embeds or labels"
    ):
        made(given["input_ids"])
    with pytest.raises(ShapeError, match=r"attention_mask must be \(B, L\) = \(3, 11\)"):
        made(given["input_ids"], given["attention_mask"][:, 1:], labels=given["labels"])
    with pytest.raises(DtypeError, match="must be integers"):
        made(given["input_ids"].float(), labels=given["labels"])
    with pytest.raises(ShapeError, match=r"token ids must be \(B, L\)"):
        made(given["input_ids"][0], labels=given["labels"])
    with pytest.raises(OptionError, match="without a front end"):
        made(input_features=torch.randn(1, 9, 80), labels=given["labels"])


def test_conversion_says_where_mechanisms_are_named():
    with pytest.raises(UnsupportedError, match="have their mechanisms from its config"):
        sq.convert(model(), "softmax")


# ---- initial values --------------------------------------------------------------------------


def test_initial_values_are_the_papers():
    made = model(source_vocab_size=401, d_model=64, num_heads=4)
    for name, module in made.named_modules():
        if isinstance(module, nn.Linear) and module is not made.head:
            bound = math.sqrt(6 / sum(module.weight.shape))
            largest = module.weight.abs().max().item()
            assert 0.9 * bound < largest <= bound, name  # of ≥ 832 draws, 1e-38 are all below
            assert not module.bias.any(), name
        if isinstance(module, nn.MultiheadAttention):
            bound = math.sqrt(6 / sum(module.in_proj_weight.shape))
            assert 0.9 * bound < module.in_proj_weight.abs().max().item() <= bound, name
            assert not module.in_proj_bias.any(), name
        if isinstance(module, nn.LayerNorm):
            assert module.weight.eq(1).all() and not module.bias.any(), name
    table = made.embed_source.weight
    assert not table[0].any()  # padding
    # 25,600 normal draws: the deviation of their std is 0.0044 of it.
    assert abs(table[1:].std().item() * 8 - 1) < 5 * 0.0044


@pytest.mark.parametrize("mechanism", [PERFORMER, "rfa(features=8)", "near_far(window=3, heavy=2)"])
def test_mechanisms_draw_from_their_own_seeds(mechanism):
    """transformers' initial values leave them alone: they equal those of `sq.build`."""
    made = model(mechanism, seed=5)
    torch.manual_seed(99)
    other = sq.models.Seq2SeqTransformer(config(mechanism, seed=5))
    assert not torch.equal(made.encoder.blocks[0].attention.in_proj_weight,
                           other.encoder.blocks[0].attention.in_proj_weight)  # fmt: skip
    for stack, seed in ((made.encoder, 5), (made.decoder, 5 + DECODER_SEED)):
        attentions = [block.attention for block in stack.blocks if hasattr(block, "attention")]
        for place, attention in enumerate(attentions):
            for_use = attention.mechanism.config
            alone = sq.build(
                for_use, head_dim=6, num_heads=4, max_length=512, seed=seed + 10_007 * place
            )
            held = attention.mechanism.state_dict()
            assert held.keys() == alone.state_dict().keys()
            for name, tensor in alone.state_dict().items():
                assert torch.equal(held[name], tensor), (place, name)
    for name, tensor in made.state_dict().items():
        if ".mechanism." in name:
            assert torch.equal(other.state_dict()[name], tensor), name


# ---- saving ----------------------------------------------------------------------------------

SAVED = [PERFORMER, "rfa(features=8)", "linformer(k=4)", "near_far(window=3, heavy=2)"]


def for_saving(mechanism, **options):
    if not mechanism.startswith(("performer", "rfa")):
        options |= {"decoder_mechanism": PERFORMER, "cross_mechanism": PERFORMER}
        options |= {"max_position_embeddings": 16}
    return model(mechanism, **options)


@pytest.mark.parametrize("mechanism", SAVED)
def test_save_and_load_bit_for_bit(mechanism, tmp_path):
    made = for_saving(mechanism)
    with torch.no_grad():  # no longer what the seed says
        for name, tensor in made.state_dict().items():
            if tensor.is_floating_point() and ".mechanism." in name:
                tensor.add_(0.1)
    made.save_pretrained(tmp_path)
    given = batch()
    wanted = made(**given).logits
    for loader in (transformers.AutoModelForSeq2SeqLM, sq.models.Seq2SeqTransformer):
        again, info = loader.from_pretrained(tmp_path, output_loading_info=True)
        assert type(again) is sq.models.Seq2SeqTransformer and not again.training
        assert not info["missing_keys"] and not info["unexpected_keys"]
        held = again.state_dict()
        assert held.keys() == made.state_dict().keys()
        for name, tensor in made.state_dict().items():
            assert torch.equal(held[name], tensor), name
        assert again.head.weight is again.embed.weight
        assert torch.equal(again(**given).logits, wanted)


@pytest.mark.parametrize("mechanism", [SAVED[0], SAVED[1], SAVED[3]])
def test_missing_buffers_are_drawn_as_the_seed_says(mechanism, tmp_path):
    made = for_saving(mechanism, seed=7)
    made.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    buffers = {name for name, _ in made.named_buffers()}
    assert buffers
    kept = {name: one for name, one in load_file(path).items() if name not in buffers}
    save_file(kept, path, {"format": "pt"})
    torch.manual_seed(123)
    again, info = sq.models.Seq2SeqTransformer.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == buffers
    for name, tensor in made.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_missing_weights_have_initial_values(tmp_path):
    made = model()
    with torch.no_grad():
        made.encoder.blocks[0].norm.weight.fill_(3.0)
    made.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    lost = {"encoder.blocks.2.norm.weight", "encoder.blocks.1.feed_forward.linear1.weight",
            "encoder.blocks.0.attention.in_proj_weight"}  # fmt: skip
    save_file({k: v for k, v in load_file(path).items() if k not in lost}, path, {"format": "pt"})
    again = sq.models.Seq2SeqTransformer.from_pretrained(tmp_path)
    held = again.state_dict()
    assert held["encoder.blocks.0.norm.weight"].eq(3).all()
    assert held["encoder.blocks.2.norm.weight"].eq(1).all()
    for name in lost - {"encoder.blocks.2.norm.weight"}:
        bound = math.sqrt(6 / sum(held[name].shape))
        assert 0.8 * bound < held[name].abs().max().item() <= bound, name
    for name, tensor in made.state_dict().items():
        assert name in lost or torch.equal(held[name], tensor), name


def test_copies_and_pickles():
    made = model()
    wanted = made(**batch()).logits
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(again(**batch()).logits, wanted)
        assert again.head.weight is again.embed.weight is not made.embed.weight


def test_embeddings_are_resized():
    made = model()
    before = made.embed.weight.detach().clone()
    made.resize_token_embeddings(V + 6, mean_resizing=False)
    assert made.head.weight is made.embed.weight and made.config.vocab_size == V + 6
    assert torch.equal(made.embed.weight[:V], before)
    assert made(**batch()).logits.shape[-1] == V + 6
    new = made.embed.weight[V:]
    assert 0.5 < new.std().item() * 24**0.5 < 1.5  # 144 normal draws


# ---- training --------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_recomputing_activations_gives_the_same_gradients(dropout):
    made = model(dropout=dropout).train()
    found = []
    for again in (False, True):
        if again:
            made.activation_checkpointing_enable()
            assert made.encoder.gradient_checkpointing and made.decoder.gradient_checkpointing
        torch.manual_seed(4)
        made.zero_grad()
        made(**batch()).loss.backward()
        found.append([parameter.grad.clone() for parameter in made.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_bfloat16(tmp_path):
    made = model()
    wanted = made(**batch())
    made.save_pretrained(tmp_path)
    half = sq.models.Seq2SeqTransformer.from_pretrained(tmp_path, dtype=torch.bfloat16)
    found = half(**batch())
    assert found.logits.dtype == torch.bfloat16 and found.loss.dtype == torch.float32
    # 2^-9 a rounding, some fifty of them in a row, of logits around 1
    assert (found.logits.float() - wanted.logits).abs().max() < 0.1 * wanted.logits.abs().max()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = made(**batch())
    mixed.loss.backward()
    assert abs(mixed.loss.item() - wanted.loss.item()) < 0.1
    assert half.generate(ids(), max_new_tokens=3).shape[0] == B


@pytest.mark.parametrize(
    "mechanism",
    [PERFORMER, *(pytest.param(one, marks=pytest.mark.slow) for one in ("softmax", "linear"))],
)
def test_compiles_whole_and_once_for_all_lengths(mechanism):
    made = model(mechanism, encoder_layers=1, decoder_layers=1)
    counter = torch._dynamo.testing.CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(made, backend=counter, fullgraph=True, dynamic=True)
    for source, target in ((11, 7), (13, 5), (29, 19), (17, 31)):
        given = {
            "input_ids": ids(source),
            "attention_mask": padded(source)[1],
            "labels": ids(target, seed=1),
        }
        torch.testing.assert_close(compiled(**given).loss, made(**given).loss)
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_the_trainer_trains_it(tmp_path):
    made = model(dropout=0.1)
    before = {name: one.detach().clone() for name, one in made.named_parameters()}
    rows = [{"input_ids": [5, 6 + i, 2], "labels": [7 + i, 2]} for i in range(8)]
    arguments = transformers.TrainingArguments(
        tmp_path, max_steps=2, per_device_train_batch_size=4, report_to="none", use_cpu=True,
        learning_rate=1e-2, save_strategy="steps", save_steps=2, remove_unused_columns=False,
        disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = transformers.Trainer(made, arguments, train_dataset=rows, data_collator=pad_batch)
    assert math.isfinite(trainer.train().training_loss)
    moved = [name for name, one in made.named_parameters() if not torch.equal(one, before[name])]
    assert len(moved) == len(before)
    again = sq.models.Seq2SeqTransformer.from_pretrained(tmp_path / "checkpoint-2")
    assert all(
        torch.equal(again.state_dict()[name], one) for name, one in made.state_dict().items()
    )


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft asks for it
def test_lora_attaches_and_learns():
    peft = pytest.importorskip("peft")
    made = model()
    wanted = made(**batch()).logits
    lora = peft.LoraConfig(r=2, target_modules=["linear1", "linear2"])
    adapted = peft.get_peft_model(made, lora)
    assert torch.equal(adapted(**batch()).logits, wanted)  # B of the adapters starts at zero
    trained = {name for name, one in adapted.named_parameters() if one.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    optimiser = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], 1.0)
    for _ in range(2):  # A has a gradient once B is no longer zero
        optimiser.zero_grad()
        adapted(**batch()).loss.backward()
        optimiser.step()
    assert all(one.grad.any() for one in adapted.parameters() if one.requires_grad)
    assert not torch.equal(adapted(**batch()).logits, wanted)
