"""Hugging Face's models, of no size and without downloads: converted, explained, rewritten, compiled."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import polyamp

transformers = pytest.importorskip("transformers")

IDS = torch.arange(16).reshape(2, 8) % 90 + 3
TEXT = {"input_ids": IDS, "labels": IDS}
CHOICE = {"input_ids": IDS, "labels": torch.tensor([0, 1])}
SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
ENDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def made(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**settings))


WHISPER = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_mel_bins": 8,
    "max_source_positions": 10,
    "max_target_positions": 16,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
WAV2VEC2 = {
    "conv_dim": (16, 16),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 4),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
}
VIT = {"image_size": 16, "patch_size": 8}
DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}

MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "bert": (made("BertForSequenceClassification", "BertConfig", **SMALL), CHOICE),
    "gpt2": (made("GPT2LMHeadModel", "GPT2Config", vocab_size=99, n_embd=32, n_layer=1, n_head=2, **ENDS), TEXT),
    "llama": (made("LlamaForCausalLM", "LlamaConfig", **SMALL, num_key_value_heads=1), TEXT),
    "t5": (made("T5ForConditionalGeneration", "T5Config", vocab_size=99, **T5), TEXT),
    "whisper": (
        made("WhisperForConditionalGeneration", "WhisperConfig", vocab_size=99, d_model=32, **ENDS, **WHISPER),
        {"input_features": torch.linspace(-1, 1, 320).reshape(2, 8, 20), "labels": IDS},
    ),
    "vit": (
        made("ViTForImageClassification", "ViTConfig", **{**SMALL, **VIT}),
        {"pixel_values": torch.linspace(-1, 1, 1536).reshape(2, 3, 16, 16), "labels": torch.tensor([0, 1])},
    ),
    "mamba": (
        made("MambaForCausalLM", "MambaConfig", vocab_size=99, hidden_size=32, state_size=4, num_hidden_layers=1),
        TEXT,
    ),
    "wav2vec2": (
        made("Wav2Vec2ForCTC", "Wav2Vec2Config", **{**SMALL, "vocab_size": 32}, **WAV2VEC2),
        {"input_values": torch.linspace(-1, 1, 800).reshape(2, 400), "labels": torch.ones(2, 2, dtype=torch.long)},
    ),
    "gemma2": (made("Gemma2ForCausalLM", "Gemma2Config", **SMALL, num_key_value_heads=1, head_dim=16), TEXT),
    "deberta": (made("DebertaV2ForSequenceClassification", "DebertaV2Config", **SMALL, **DEBERTA), CHOICE),
    "mixtral": (
        made("MixtralForCausalLM", "MixtralConfig", **SMALL, num_key_value_heads=1, num_local_experts=2),
        TEXT,
    ),
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Ignore deprecations between the libraries."""
    transformers.logging.set_verbosity_error()
    torch._dynamo.reset()
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning, UserWarning):
            warnings.simplefilter("ignore", category)
        warnings.simplefilter("error", polyamp.PolyampWarning)
        yield


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, dict[str, Any]]:
    make, inputs = MODELS[request.param]
    torch.manual_seed(0)
    return make().eval(), inputs  # without random dropout


def losses(model: nn.Module, inputs: Any, policy: str | None, steps: int = 4) -> list[float]:
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-2)
    if policy is not None:
        polyamp.convert(model, policy)
        scale = {} if policy == "bfloat16" else {"loss_scale": polyamp.LossScale(init=2**6)}
        optimizer = polyamp.wrap_optimizer(optimizer, policy, **scale)
    found = []
    for _ in range(steps):
        loss = model(**inputs).loss
        optimizer.backward(loss) if policy else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("policy", ["O2", "O3", "float16", "bfloat16"])
def test_converted_models_train_as_in_float32(case: Any, policy: str) -> None:
    model, inputs = case
    expected, kind = losses(copy.deepcopy(model), inputs, None), type(model(**inputs))
    assert losses(model, inputs, policy) == pytest.approx(expected, rel=0.05 if policy == "bfloat16" else 0.02)
    out = model(**inputs)
    assert type(out) is kind
    norms = [part for part in model.modules() if type(part).__name__.endswith(("Norm", "RMSNorm"))]
    own = {param.dtype for part in norms for param in part.parameters(recurse=False)}
    if policy == "O2":
        assert own == {out.loss.dtype} == {out.logits.dtype} == {torch.float32}


def test_generation_goes_on_with_the_cache() -> None:
    torch.manual_seed(0)
    model = polyamp.convert(MODELS["llama"][0]().eval(), "O2")
    cache = model(input_ids=IDS[:, :7]).past_key_values
    step = model(input_ids=IDS[:, 7:], past_key_values=cache)
    whole = model(input_ids=IDS)
    torch.testing.assert_close(step.logits[:, -1], whole.logits[:, -1], rtol=0.02, atol=0.005)
    assert step.past_key_values is cache
    assert model.generate(IDS, max_new_tokens=3, do_sample=False).shape == (2, 11)


@pytest.mark.parametrize("engine", [None, "autocast"])
def test_every_model_has_a_plan(case: Any, engine: str | None) -> None:
    model, inputs = case
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    plan = polyamp.explain(model, policy="mixed_bfloat16", engine=engine, **inputs)
    assert {op.format for op in plan.operations if op.name == "matmul"} >= {"bfloat16"}
    assert plan.engine.startswith("autocast" if engine else ("rewrite", "autocast, recorded: "))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_models_with_logs_and_caches_are_rewritten(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name][0]().eval()
    rewritten = polyamp.rewrite(model, policy="mixed_bfloat16", input_ids=IDS)
    for ids in (IDS, IDS[:, :5]):
        ours, theirs = rewritten(input_ids=ids), model(input_ids=ids)
        assert type(ours) is type(theirs)
        torch.testing.assert_close(ours.logits, theirs.logits, rtol=0.05, atol=0.05)
        assert type(ours.past_key_values) is type(theirs.past_key_values)
        assert ours.past_key_values.get_seq_length() == ids.shape[1]
        keys = [cache.past_key_values.layers[0].keys for cache in (ours, theirs)]
        torch.testing.assert_close(*keys, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", ["llama", "wav2vec2"])
def test_compiled_models_compute_what_they_do(name: str) -> None:
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model = make().eval()
    fast = torch.compile(model, backend="eager")
    with polyamp.autocast("mixed_bfloat16"):
        loss = fast(**inputs).loss
    loss.backward()
    torch.testing.assert_close(loss.float(), model(**inputs).loss, rtol=0.02, atol=0.02)
    assert not torch.is_autocast_enabled("cpu")
