"""Models of Hugging Face transformers on plsh: tiny, random, and without the network."""

import copy
import os
import subprocess
import sys

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

import plsh_torch.transformers as on_plsh
import torch
import transformers
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    MptForCausalLM,
    Qwen3Config,
)

import plsh

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen3": Qwen3Config}
NAMES = ("plsh", "plsh_window", "plsh_exact")
N, PAD = 24, 5
ROUNDING = 3e-6
"""Of float32 logits of order 1 through two layers; measured: 4e-7 (interface), 3e-6 (native)."""


def tokens(rows=2, n=N):
    return torch.randint(3, 50, (rows, n), generator=torch.Generator().manual_seed(n))


def interface_model(family="llama", name="plsh_window", **more):
    on_plsh.register()
    torch.manual_seed(0)
    config = CONFIGS[family](**{**SIZES, **more})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name)
    return louder(model)


def native_model(family, heads=4, **more):
    torch.manual_seed(0)
    if family == "bloom":
        config = BloomConfig(
            vocab_size=50, hidden_size=8 * heads, n_layer=2, n_head=heads, use_cache=True, **more
        )
        return louder(BloomForCausalLM(config))
    config = MptConfig(vocab_size=50, d_model=8 * heads, n_layers=2, n_heads=heads, max_seq_len=64)
    config.use_cache = True
    return louder(MptForCausalLM(config))


def louder(model):
    """Scale the weights up, so that attention isn't flat."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(6)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


@torch.no_grad()
def logits(model, ids, **keywords):
    return model(ids, **keywords).logits


def padded(ids, pads, left=True):
    """Return the ids with padding on one side of each row, and their mask."""
    whole = [
        torch.cat([torch.full((pad,), 7), row][:: 1 if left else -1])
        for row, pad in zip(ids, pads, strict=True)
    ]
    mask = torch.ones((len(ids), len(whole[0])), dtype=torch.long)
    for row, pad in enumerate(pads):
        mask[row, slice(0, pad) if left else slice(len(whole[0]) - pad, None)] = 0
    return torch.stack(whole), mask


def generate(model, ids, new=6, **keywords):
    mask = keywords.pop("attention_mask", torch.ones_like(ids))
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **keywords)


def close(got, want, tolerance=ROUNDING):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


# --- the interface ---


@pytest.mark.parametrize("family", CONFIGS)
def test_with_slopes_0_and_rope_a_model_computes_what_eager_does(family):
    """U116."""
    model = interface_model(family, "eager")
    want = logits(model, tokens())
    on_plsh.switch(model, "exact", slopes=[0.0] * 4)
    close(logits(model, tokens()), want)


@pytest.mark.parametrize("name", NAMES)
def test_later_tokens_are_hidden(name):
    """U116, U041: a mask that is None would show them."""
    model, ids = interface_model(name=name), tokens()
    want = logits(model, ids)
    ids[:, -1] = 1
    assert torch.equal(logits(model, ids)[:, :-1], want[:, :-1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", CONFIGS)
def test_generation_with_the_default_cache_equals_that_without(family, name):
    model = interface_model(family, name)
    want = generate(model, tokens(), use_cache=False)
    assert torch.equal(generate(model, tokens()), want)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("left", [True, False])
def test_padded_rows_equal_the_rows_alone(name, left):
    """U035, under lsh too: positions count from a row's first token."""
    model = interface_model(name=name)
    ids = tokens(1)
    rows, mask = padded([ids[0], ids[0, PAD:]], [PAD, 2 * PAD], left)
    more = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if left else {}
    got = logits(model, rows, attention_mask=mask, **more)
    for row, alone in enumerate((ids, ids[:, PAD:])):
        close(got[row, mask[row] > 0], logits(model, alone)[0])


@pytest.mark.parametrize("name", NAMES)
def test_a_left_padded_batch_generates_what_its_rows_do(name):
    """U036: the padding isn't lost when single tokens follow."""
    model, ids = interface_model(name=name), tokens(1)
    rows, mask = padded([ids[0], ids[0, PAD:]], [PAD, 2 * PAD])
    got = generate(model, rows, attention_mask=mask)
    assert torch.equal(got[:1, -6:], generate(model, ids)[:, -6:])
    assert torch.equal(got[1:, -6:], generate(model, ids[:, PAD:])[:, -6:])


@pytest.mark.parametrize("name", ["plsh_window", "plsh_exact"])
def test_packed_documents_equal_separate_ones(name):
    """U039."""
    model, ids = interface_model(name=name), tokens(1)
    positions = torch.cat([torch.arange(9), torch.arange(N - 9)])[None]
    got = logits(model, ids, position_ids=positions, use_cache=False)
    parts = [logits(model, ids[:, :9]), logits(model, ids[:, 9:])]
    close(got, torch.cat(parts, 1))


def test_packed_documents_do_not_see_one_another_under_lsh():
    """Their blocks are those of their places in the row: another draw than alone."""
    model, ids = interface_model(name="plsh"), tokens(1)
    positions = torch.cat([torch.arange(9), torch.arange(N - 9)])[None]
    want = logits(model, ids, position_ids=positions, use_cache=False)
    ids[:, 4] = 1
    got = logits(model, ids, position_ids=positions, use_cache=False)
    assert torch.equal(got[:, 9:], want[:, 9:])
    assert not torch.equal(got[:, :9], want[:, :9])


def test_packed_positions_that_the_library_overlooks_are_refused():
    model = interface_model()
    positions = torch.cat([torch.arange(9), torch.arange(N - 9)])[None]
    with pytest.raises(ValueError, match=r"position_ids must grow by 1.*use_cache=False"):
        model(tokens(1), position_ids=positions, use_cache=True)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_activation_checkpointing_changes_no_gradient(name, reentrant):
    model = interface_model(name=name).train()
    found = []
    for _ in range(2):
        model.zero_grad()
        model(tokens(), labels=tokens(), use_cache=False).loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
        model.activation_checkpointing_enable(
            activation_checkpointing_kwargs={"use_reentrant": reentrant}
        )
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_static_cache_generates_what_the_default_does(name):
    model = interface_model(name=name)
    rows, mask = padded(tokens(), [PAD, PAD])
    want = generate(model, rows, attention_mask=mask)
    got = generate(model, rows, attention_mask=mask, cache_implementation="static")
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["plsh_window", "plsh_exact"])
def test_a_sliding_window_of_the_model_is_kept(name):
    """Logits of eager attention with the same window, at slope 0; and with its cache."""
    model = interface_model("mistral", "eager", sliding_window=7)
    want = logits(model, tokens())
    method = plsh.Exact() if name == "plsh_exact" else plsh.Window(20)
    on_plsh.switch(model, method, slopes=[0.0] * 4)
    close(logits(model, tokens()), want)
    assert torch.equal(generate(model, tokens()), generate(model, tokens(), use_cache=False))


def test_each_layer_and_step_has_blocks_of_its_own_under_lsh():
    model = on_plsh.switch(interface_model(), plsh.PositionalLSH(2), seed=5)
    plain = logits(model, tokens())
    on_plsh.set_step(model, 3)
    stepped = logits(model, tokens())
    assert not torch.equal(stepped, plain)
    assert torch.equal(logits(model, tokens()), stepped)
    on_plsh.set_step(model, None)
    assert torch.equal(logits(model, tokens()), plain)
    for module in (layer.self_attn for layer in model.model.layers):
        assert on_plsh._settings.plan_of(module)[0].seed == (5, module.layer_idx)


def test_the_callback_sets_the_step_of_the_trainer():
    model = on_plsh.switch(interface_model(), "lsh")
    state = transformers.TrainerState(global_step=7)
    on_plsh.StepCallback().on_step_begin(None, state, None, model=model)
    assert on_plsh._settings.plan_of(model.model.layers[1].self_attn)[0].seed == (0, 1, 7)


# --- switching ---


@pytest.mark.parametrize("family", CONFIGS)
def test_rope_is_replaced_and_put_back(family):
    model = interface_model(family, "sdpa")
    before, names = logits(model, tokens()), list(model.state_dict())
    kept = logits(on_plsh.switch(model, "exact"), tokens())
    without = logits(on_plsh.switch(model, "exact", rope=False), tokens())
    assert (without - kept).abs().max() > 1e-3
    # Positions of the library's own mean nothing to it now.
    shifted = logits(model, tokens(), position_ids=torch.arange(N)[None] + 9)
    assert torch.equal(shifted, without)
    assert list(model.state_dict()) == names
    on_plsh.switch(model, None)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(logits(model, tokens()), before)


@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_a_switched_native_model_equals_eager(family, heads):
    """U043, U056: their own slopes, at head counts of either recipe; padded or not."""
    model = native_model(family, heads)
    cases = [(tokens(), None), *(padded(tokens(), [PAD, PAD], left) for left in (True, False))]
    want = [logits(model, ids, attention_mask=mask) for ids, mask in cases]
    text = generate(model, cases[1][0], attention_mask=cases[1][1])
    for method, tolerance in (("exact", ROUNDING), ("window", 2e-5)):
        on_plsh.switch(model, method)
        for (ids, mask), expected in zip(cases, want, strict=True):
            real = slice(None) if mask is None else mask > 0
            for cached in (True, False):
                got = logits(model, ids, attention_mask=mask, use_cache=cached)
                close(got[real], expected[real], tolerance)
        assert torch.equal(generate(model, cases[1][0], attention_mask=cases[1][1]), text)
    on_plsh.switch(model, None)
    assert torch.equal(logits(model, tokens()), want[0])


@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_under_autocast_a_native_model_errs_no_more_than_eager(family):
    """In bfloat16, against eager in float32."""
    model = native_model(family)
    want = logits(model, tokens())
    errors = []
    for method in (None, "exact"):
        on_plsh.switch(model, method)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = logits(model, tokens())
        assert got.dtype == torch.bfloat16
        errors.append((got - want).norm() / want.norm())
    assert 0 < errors[1] < 1.5 * errors[0], errors


def test_a_native_model_keeps_the_slopes_of_its_own_bias():
    model = native_model("mpt")
    build = model.transformer.build_mpt_alibi_tensor
    model.transformer.build_mpt_alibi_tensor = lambda heads, n, device=None: build(
        heads, n, 4, device
    )
    want = logits(model, tokens())
    close(logits(on_plsh.switch(model, "exact"), tokens()), want)


@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_a_switched_native_model_forms_no_square_mask(family, monkeypatch):
    model = on_plsh.switch(native_model(family))
    seen = []
    inner = type(model.base_model.get_submodule("h.0" if family == "bloom" else "blocks.0"))
    forward = inner.forward
    monkeypatch.setattr(
        inner, "forward", lambda self, *a, **k: seen.append(k) or forward(self, *a, **k)
    )
    logits(model, tokens())
    assert all(x.attention_mask.ids is None for x in map(_Bag, seen))


class _Bag:
    def __init__(self, words):
        self.__dict__.update(words)


# Of BLOOM's own activation, when torch traces it.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("family", ["bloom", "mpt", "llama"])
def test_a_switched_model_compiles_without_a_break(family):
    """U070."""
    model = native_model(family) if family != "llama" else interface_model()
    on_plsh.switch(model, "window")
    rows, mask = padded(tokens(), [PAD, PAD])
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for more in ({}, {"attention_mask": mask}):
        got = logits(compiled, rows, use_cache=False, **more)
        close(got, logits(model, rows, use_cache=False, **more))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script(_method)?. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("family", ["bloom", "llama"])
def test_inductor_trains_a_switched_model_as_eager(family):
    """U070: every parameter's gradient, of padded rows."""
    model = native_model(family) if family != "llama" else interface_model()
    on_plsh.switch(model, "window").train()
    rows, mask = padded(tokens(), [PAD, PAD])

    def gradients(of):
        model.zero_grad()
        of(rows, labels=rows, attention_mask=mask, use_cache=False).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    want = gradients(model)
    for got, x in zip(gradients(torch.compile(model, fullgraph=True)), want, strict=True):
        assert (got - x).norm() <= 2e-6 * x.norm() + 1e-12


def test_switching_one_model_leaves_another_of_the_same_config_alone():
    config = BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=4)
    one, other = BloomForCausalLM(config).eval(), BloomForCausalLM(config).eval()
    want = logits(other, tokens())
    on_plsh.switch(one, "window")
    assert torch.equal(logits(other, tokens()), want)


def test_a_switched_model_is_copied_whole():
    model = on_plsh.switch(native_model("bloom"), plsh.Window(4))
    other = copy.deepcopy(model)
    assert torch.equal(logits(other, tokens()), logits(model, tokens()))
    on_plsh.switch(other, None)
    assert not torch.equal(logits(other, tokens()), logits(model, tokens()))


# --- the bounded cache ---


@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("method", [plsh.Window((3, 70, 5, 40)), plsh.PositionalLSH(2)], ids=repr)
@pytest.mark.parametrize("family", ["llama", "mistral", "bloom", "mpt"])
def test_the_bounded_cache_generates_what_the_full_one_does(family, method, per_head):
    """Prompts beyond the buffer and within; the buffer moves while tokens follow."""
    model = native_model(family) if family in ("bloom", "mpt") else interface_model(family)
    on_plsh.switch(model, method, slopes=[0.5, 0.25, 0.4, 0.3])
    for n in (9, 200):
        if family == "mpt" and n > 64:
            continue  # its own bias ends there
        rows, mask = padded(tokens(n=n), [PAD, PAD])
        want = generate(model, rows, 90 if n == 9 else 6, attention_mask=mask, use_cache=True)
        cache = on_plsh.BoundedCache(model, per_head=per_head)
        got = generate(
            model, rows, 90 if n == 9 else 6, attention_mask=mask, use_cache=True, cache=cache
        )
        assert torch.equal(got, want)


@pytest.mark.parametrize("per_head", [True, False])
def test_the_bounded_cache_gives_the_logits_of_the_full_one(per_head):
    """Token by token past a move of the buffer, then in chunks."""
    model = on_plsh.switch(native_model("bloom"), plsh.Window((3, 70, 5, 40)))
    caches = on_plsh.BoundedCache(model, per_head=per_head), transformers.DynamicCache()
    ids = tokens(1, 180)
    for part in ids.split([9] + [1] * 70 + [30, 1, 70], 1):
        got, want = (logits(model, part, cache=cache, use_cache=True) for cache in caches)
        close(got, want)


def test_the_bounded_cache_takes_constant_memory():
    model = on_plsh.switch(interface_model(), plsh.Window((2, 2, 9, 9)))
    cache = on_plsh.BoundedCache(model)
    assert [layer.runs for layer in cache.layers] == [((0, 2, 9),)] * 2
    sizes = set()
    for n in (30, 1, 1, 200, 1, 80):
        logits(model, tokens(n=n), cache=cache, use_cache=True)
        sizes.add(cache.nbytes)
    assert cache.get_seq_length() == 313
    assert sizes == {2 * 2 * 2 * 2 * (9 + 64) * 8 * 4}


def test_beams_move_the_rows_of_the_bounded_cache():
    model = on_plsh.switch(interface_model(), plsh.Window(6))
    want = generate(model, tokens(), 12, num_beams=3)
    got = generate(model, tokens(), 12, num_beams=3, cache=on_plsh.BoundedCache(model))
    assert torch.equal(got, want)


def test_a_bounded_cache_for_another_method_is_refused():
    model = on_plsh.switch(interface_model(), plsh.Window(3))
    cache = on_plsh.BoundedCache(model)
    on_plsh.switch(model, plsh.Window(5))
    logits(model, tokens(), cache=cache, use_cache=True)
    with pytest.raises(ValueError, match=r"cache keeps 3 tokens.*sees 5"):
        logits(model, tokens(n=1), cache=cache, use_cache=True)


# --- what is refused ---


def _dense(model):
    model(tokens(), attention_mask=torch.ones((2, 1, N, N), dtype=torch.bool))


def _hole(model):
    mask = torch.ones_like(tokens())
    mask[0, 4] = 0
    model(tokens(), attention_mask=mask)


def _static_sliding(model):
    generate(interface_model("mistral"), tokens(), cache_implementation="static")


def _sliding_lsh(model):
    interface_model("mistral", "plsh", sliding_window=7)(tokens())


REFUSED = {
    "dropout": (TypeError, "drops no attention weights", lambda m: dropout(m)(tokens())),
    "dense mask": (TypeError, "must have shape .batch, tokens.", _dense),
    "hole": (ValueError, "no padding between the tokens", _hole),
    "short mask": (
        ValueError,
        "must cover the 24 tokens",
        lambda m: m(tokens(), attention_mask=torch.ones((2, 3))),
    ),
    "static sliding": (TypeError, "no static cache of a sliding window", _static_sliding),
    "sliding lsh": (TypeError, "can't cut blocks of lsh", _sliding_lsh),
    "weights": (TypeError, "output_attentions must be False", lambda m: m(
        tokens(), output_attentions=True)),
    "softcap": (TypeError, "can't honour softcap", lambda m: m(tokens(), softcap=30.0)),
    "method": (TypeError, "method must be one of", lambda m: on_plsh.switch(m, "flash")),
    "slopes": (ValueError, "one number per head .4.", lambda m: on_plsh.switch(m, slopes=[1.0])),
    "model": (TypeError, "Llama, Mistral", lambda m: on_plsh.switch(torch.nn.Linear(1, 1))),
    "rope": (ValueError, "no rotary", lambda m: on_plsh.switch(native_model("mpt"), rope=False)),
    "step": (TypeError, "must be switched", lambda m: on_plsh.set_step(m, 1)),
    "exact cache": (ValueError, "seen for ever", lambda m: on_plsh.BoundedCache(
        on_plsh.switch(m, "exact"))),
    "eager cache": (TypeError, "must run on plsh", lambda m: on_plsh.BoundedCache(
        native_model("bloom"))),
    "crop": (NotImplementedError, "can't be cropped", lambda m: on_plsh.BoundedCache(m).crop(-1)),
    "gradient": (RuntimeError, "autograd", lambda m: m(
        tokens(), cache=on_plsh.BoundedCache(m), use_cache=True)),
    "native dropout": (TypeError, "drops no", lambda m: on_plsh.switch(
        native_model("bloom", attention_dropout=0.1)).train()(tokens())),
    "native weights": (TypeError, "must be False", lambda m: on_plsh.switch(
        native_model("mpt"))(tokens(), output_attentions=True)),
}  # fmt: skip


def dropout(model):
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    return model.train()


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused_with_the_reason(case):
    error, message, call = REFUSED[case]
    with pytest.raises(error, match=message):
        call(interface_model())


def test_without_transformers_the_remedy_is_named():
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import plsh_torch\n"
        "assert plsh_torch.ALiBiAttention\n"
        "try:\n    import plsh_torch.transformers\n"
        "except ImportError as error:\n"
        "    assert 'pip install \"plsh[transformers]\"' in str(error), error\n"
        "else:\n    raise SystemExit('imported')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
