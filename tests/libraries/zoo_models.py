"""The programs of the zoo: models of other people's libraries, tiny and untrained.

Each function builds one `Case` and imports its library itself, so that a library that
is not installed costs its own programs only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

os.environ.setdefault("KERAS_BACKEND", "jax")

Loss = Callable[[Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Case:
    """One program.

    Attributes:
      loss: (params, batch) -> (loss, outputs).
      params: float32 parameters, a tree.
      batch: inputs, a tree.
      own: dtype -> the same loss in the library's own half-precision mode.
      trains: False if an optimizer makes no sense of it.
    """

    loss: Loss
    params: Any
    batch: Any
    own: Callable[[Any], Loss] | None = None
    trains: bool = True


PROGRAMS: dict[str, Callable[[], Case]] = {}
WIDTH, LAYERS, BATCH, LENGTH, VOCAB = 48, 2, 4, 16, 96


def program(build: Callable[[], Case]) -> Callable[[], Case]:
    """Adds a program under its function's name."""
    PROGRAMS[build.__name__] = build
    return build


def _normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def _ints(seed: int, high: int, *shape: int) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), shape, 0, high)


def _xent(logits: Any, labels: Any) -> Any:
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _mse(a: Any, b: Any) -> Any:
    return jnp.mean((a.astype(jnp.promote_types(a.dtype, jnp.float32)) - b) ** 2)


# ---- Flax Linen


def _linen(
    make: Callable[[Any], Any], x: Any, labels: Any, stats: bool = False
) -> Case:
    key = jax.random.key(1)
    variables = make(None).init({"params": key, "dropout": key}, x)
    rest = {k: v for k, v in variables.items() if k != "params"}

    def build(dtype: Any) -> Loss:
        module = make(dtype)

        def loss(params: Any, batch: Any) -> Any:
            x, labels, rest, key = batch
            out = module.apply(
                {"params": params, **rest},
                x,
                rngs={"dropout": key},
                mutable=["batch_stats"] if stats else False,
            )
            logits, new = out if stats else (out, {})
            return _xent(logits, labels), (logits, new)

        return loss

    return Case(build(None), variables["params"], (x, labels, rest, key), build)


@program
def linen_mlp() -> Case:
    """Dense, GELU, LayerNorm, dropout."""
    import flax.linen as nn

    class Model(nn.Module):
        dtype: Any

        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(LAYERS):
                x = nn.gelu(nn.Dense(WIDTH, dtype=self.dtype)(x))
                x = nn.LayerNorm(dtype=self.dtype)(x)
                x = nn.Dropout(0.1, deterministic=False)(x)
            return nn.Dense(10, dtype=self.dtype)(x)

    return _linen(Model, _normal(0, 32, 20), _ints(1, 10, 32))


@program
def linen_cnn() -> Case:
    """Convolutions with BatchNorm in training mode, pooling, dropout."""
    import flax.linen as nn

    class Model(nn.Module):
        dtype: Any

        @nn.compact
        def __call__(self, x: Any) -> Any:
            for width in (16, 32):
                x = nn.Conv(width, (3, 3), use_bias=False, dtype=self.dtype)(x)
                x = nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x)
                x = nn.max_pool(nn.relu(x), (2, 2), strides=(2, 2))
            x = nn.Dropout(0.2, deterministic=False)(x.mean((1, 2)))
            return nn.Dense(10, dtype=self.dtype)(x)

    return _linen(Model, _normal(0, 8, 16, 16, 3), _ints(1, 10, 8), stats=True)


@program
def linen_transformer() -> Case:
    """Pre-norm decoder under nn.scan and nn.remat, with a causal mask."""
    import flax.linen as nn

    class Block(nn.Module):
        dtype: Any

        @nn.compact
        def __call__(self, x: Any, mask: Any) -> Any:
            h = nn.LayerNorm(dtype=self.dtype)(x)
            x = x + nn.MultiHeadDotProductAttention(4, dtype=self.dtype)(h, mask=mask)
            h = nn.LayerNorm(dtype=self.dtype)(x)
            h = nn.gelu(nn.Dense(4 * WIDTH, dtype=self.dtype)(h))
            return x + nn.Dense(WIDTH, dtype=self.dtype)(h), None

    class Model(nn.Module):
        dtype: Any

        @nn.compact
        def __call__(self, x: Any) -> Any:
            mask = nn.make_causal_mask(x)
            x = nn.Embed(VOCAB, WIDTH, dtype=self.dtype)(x)
            layers = nn.scan(
                nn.remat(Block),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=LAYERS,
            )
            x, _ = layers(self.dtype)(x, mask)
            x = nn.LayerNorm(dtype=self.dtype)(x)
            return nn.Dense(VOCAB, dtype=self.dtype)(x)

    tokens = _ints(0, VOCAB, BATCH, LENGTH)
    return _linen(Model, tokens, tokens)


def _linen_rnn(bidirectional: bool) -> Case:
    import flax.linen as nn

    class Model(nn.Module):
        dtype: Any

        @nn.compact
        def __call__(self, x: Any) -> Any:
            def cell() -> Any:
                return nn.RNN(nn.OptimizedLSTMCell(WIDTH, dtype=self.dtype))

            layer = nn.Bidirectional(cell(), cell()) if bidirectional else cell()
            return nn.Dense(10, dtype=self.dtype)(layer(x))

    return _linen(Model, _normal(0, BATCH, LENGTH, 20), _ints(1, 10, BATCH, LENGTH))


@program
def linen_lstm() -> Case:
    """nn.RNN over an OptimizedLSTMCell."""
    return _linen_rnn(False)


@program
def linen_bilstm() -> Case:
    """nn.Bidirectional of two LSTMs."""
    return _linen_rnn(True)


# ---- Flax NNX


def _nnx(make: Callable[[Any, Any], Any], x: Any, labels: Any) -> Case:
    from flax import nnx

    _, params, rest = nnx.split(make(nnx.Rngs(0), None), nnx.Param, ...)

    def build(dtype: Any) -> Loss:
        graph = nnx.split(make(nnx.Rngs(0), dtype), nnx.Param, ...)[0]

        def loss(params: Any, batch: Any) -> Any:
            x, labels, rest = batch
            model = nnx.merge(graph, params, rest, copy=True)
            logits = model(x)
            stats = nnx.state(model, nnx.BatchStat)
            return _xent(logits, labels), (logits, nnx.to_pure_dict(stats))

        return loss

    return Case(build(None), params, (x, labels, rest), build)


@program
def nnx_cnn() -> Case:
    """nnx.Conv, BatchNorm, avg_pool, Linear."""
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs: Any, dtype: Any) -> None:
            self.conv = nnx.Conv(3, 16, (3, 3), dtype=dtype, rngs=rngs)
            self.norm = nnx.BatchNorm(16, dtype=dtype, rngs=rngs)
            self.conv2 = nnx.Conv(16, 32, (3, 3), dtype=dtype, rngs=rngs)
            self.out = nnx.Linear(32 * 64, 10, dtype=dtype, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = nnx.relu(self.norm(self.conv(x)))
            x = nnx.avg_pool(nnx.relu(self.conv2(x)), (2, 2), strides=(2, 2))
            return self.out(x.reshape(x.shape[0], -1))

    return _nnx(Model, _normal(0, 8, 16, 16, 3), _ints(1, 10, 8))


@program
def nnx_transformer() -> Case:
    """Post-norm encoder of nnx.MultiHeadAttention and nnx.RMSNorm."""
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: Any, dtype: Any) -> None:
            self.attention = nnx.MultiHeadAttention(
                4, WIDTH, decode=False, dtype=dtype, rngs=rngs
            )
            self.norm1 = nnx.LayerNorm(WIDTH, dtype=dtype, rngs=rngs)
            self.norm2 = nnx.RMSNorm(WIDTH, dtype=dtype, rngs=rngs)
            self.up = nnx.Linear(WIDTH, 4 * WIDTH, dtype=dtype, rngs=rngs)
            self.down = nnx.Linear(4 * WIDTH, WIDTH, dtype=dtype, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = self.norm1(x + self.attention(x))
            return self.norm2(x + self.down(nnx.silu(self.up(x))))

    class Model(nnx.Module):
        def __init__(self, rngs: Any, dtype: Any) -> None:
            self.embed = nnx.Embed(VOCAB, WIDTH, dtype=dtype, rngs=rngs)
            self.blocks = nnx.List([Block(rngs, dtype) for _ in range(LAYERS)])

        def __call__(self, x: Any) -> Any:
            x = self.embed(x)
            for block in self.blocks:
                x = block(x)
            return self.embed.attend(x)

    tokens = _ints(0, VOCAB, BATCH, LENGTH)
    return _nnx(Model, tokens, tokens)


# ---- Hugging Face transformers (Flax)


def _hugging(
    name: str, config: Any, inputs: dict[str, Any], labels: Any = None
) -> Case:
    import transformers

    cls = getattr(transformers, name)
    model = cls(config, seed=0)
    key = jax.random.key(0)

    def build(dtype: Any) -> Loss:
        model = cls(config, seed=0, dtype=dtype or jnp.float32, _do_init=False)

        def loss(params: Any, batch: Any) -> Any:
            inputs, labels, key = batch
            out = model(**inputs, params=params, dropout_rng=key, train=True)
            if labels is None:
                logits = out.logits_per_image
                return _xent(logits, jnp.arange(logits.shape[0])), logits
            logits = out.logits
            return _xent(logits, labels), logits

        return loss

    return Case(build(None), model.params, (inputs, labels, key), build)


class _OldNumpy:
    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)

    def clip(self, x: Any, a_min: Any = None, a_max: Any = None) -> Any:
        return jnp.clip(x, a_min, a_max)


_BERT = dict(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    intermediate_size=2 * WIDTH,
    max_position_embeddings=2 * LENGTH,
)


def _tokens(*rest: str) -> dict[str, Any]:
    tokens = _ints(0, VOCAB - 4, BATCH, LENGTH) + 3
    mask = jnp.ones((BATCH, LENGTH), jnp.int32).at[0, LENGTH // 2 :].set(0)
    return {"input_ids": tokens, "attention_mask": mask, **dict.fromkeys(rest, tokens)}


@program
def hf_gpt2() -> Case:
    """FlaxGPT2LMHeadModel."""
    from transformers import GPT2Config

    config = GPT2Config(
        vocab_size=VOCAB, n_embd=WIDTH, n_layer=LAYERS, n_head=4, n_positions=2 * LENGTH
    )
    inputs = _tokens()
    return _hugging("FlaxGPT2LMHeadModel", config, inputs, inputs["input_ids"])


@program
def hf_bert() -> Case:
    """FlaxBertForMaskedLM."""
    from transformers import BertConfig

    inputs = _tokens()
    return _hugging(
        "FlaxBertForMaskedLM", BertConfig(**_BERT), inputs, inputs["input_ids"]
    )


@program
def hf_roberta() -> Case:
    """FlaxRobertaForSequenceClassification."""
    from transformers import RobertaConfig

    return _hugging(
        "FlaxRobertaForSequenceClassification",
        RobertaConfig(**_BERT, num_labels=3),
        _tokens(),
        _ints(3, 3, BATCH),
    )


@program
def hf_t5() -> Case:
    """FlaxT5ForConditionalGeneration; it calls `jnp.clip` by old argument names."""
    from transformers import T5Config
    from transformers.models.t5 import modeling_flax_t5

    modeling_flax_t5.jnp = _OldNumpy()

    config = T5Config(
        vocab_size=VOCAB,
        d_model=WIDTH,
        d_kv=12,
        d_ff=2 * WIDTH,
        num_layers=LAYERS,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    inputs = _tokens("decoder_input_ids")
    return _hugging(
        "FlaxT5ForConditionalGeneration", config, inputs, inputs["input_ids"]
    )


@program
def hf_bart() -> Case:
    """FlaxBartForConditionalGeneration."""
    from transformers import BartConfig

    config = BartConfig(
        vocab_size=VOCAB,
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=2 * WIDTH,
        decoder_ffn_dim=2 * WIDTH,
        max_position_embeddings=2 * LENGTH,
    )
    inputs = _tokens("decoder_input_ids")
    return _hugging(
        "FlaxBartForConditionalGeneration", config, inputs, inputs["input_ids"]
    )


@program
def hf_vit() -> Case:
    """FlaxViTForImageClassification."""
    from transformers import ViTConfig

    config = ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=2 * WIDTH,
        image_size=16,
        patch_size=4,
        num_labels=10,
    )
    inputs = {"pixel_values": _normal(0, BATCH, 3, 16, 16)}
    return _hugging(
        "FlaxViTForImageClassification", config, inputs, _ints(1, 10, BATCH)
    )


@program
def hf_clip() -> Case:
    """FlaxCLIPModel with its contrastive loss."""
    from transformers import CLIPConfig

    sizes = dict(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
    )
    config = CLIPConfig(
        text_config=dict(vocab_size=VOCAB, max_position_embeddings=LENGTH, **sizes),
        vision_config=dict(image_size=16, patch_size=4, **sizes),
        projection_dim=32,
    )
    inputs = {"pixel_values": _normal(0, BATCH, 3, 16, 16), **_tokens()}
    return _hugging("FlaxCLIPModel", config, inputs)


@program
def hf_whisper() -> Case:
    """FlaxWhisperForConditionalGeneration."""
    from transformers import WhisperConfig

    config = WhisperConfig(
        vocab_size=VOCAB,
        num_mel_bins=8,
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=2 * WIDTH,
        decoder_ffn_dim=2 * WIDTH,
        max_source_positions=16,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    tokens = _ints(0, VOCAB, BATCH, LENGTH)
    inputs = {"input_features": _normal(0, BATCH, 8, 32), "decoder_input_ids": tokens}
    return _hugging("FlaxWhisperForConditionalGeneration", config, inputs, tokens)


def _llama(cls: Any, **more: Any) -> Any:
    return cls(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2 * LENGTH,
        **more,
    )


@program
def hf_llama() -> Case:
    """FlaxLlamaForCausalLM: rotary embeddings, RMSNorm, SwiGLU."""
    from transformers import LlamaConfig

    inputs = _tokens()
    return _hugging(
        "FlaxLlamaForCausalLM", _llama(LlamaConfig), inputs, inputs["input_ids"]
    )


@program
def hf_mistral() -> Case:
    """FlaxMistralForCausalLM: sliding-window attention."""
    from transformers import MistralConfig

    inputs = _tokens()
    return _hugging(
        "FlaxMistralForCausalLM",
        _llama(MistralConfig, sliding_window=8),
        inputs,
        inputs["input_ids"],
    )


@program
def hf_gemma() -> Case:
    """FlaxGemmaForCausalLM."""
    from transformers import GemmaConfig

    inputs = _tokens()
    return _hugging(
        "FlaxGemmaForCausalLM",
        _llama(GemmaConfig, head_dim=12),
        inputs,
        inputs["input_ids"],
    )


@program
def hf_wav2vec2() -> Case:
    """FlaxWav2Vec2ForCTC with a CTC loss: 1-D convolutions, group norm."""
    from transformers import FlaxWav2Vec2ForCTC, Wav2Vec2Config

    config = Wav2Vec2Config(
        vocab_size=32,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=2 * WIDTH,
        conv_dim=(16, 16, 16),
        conv_stride=(5, 2, 2),
        conv_kernel=(10, 3, 3),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
        mask_time_prob=0.0,
    )
    x = _normal(0, 2, 640)
    model = FlaxWav2Vec2ForCTC(config, seed=0, input_shape=(1, 640))
    labels = _ints(1, 31, 2, 6) + 1

    def build(dtype: Any) -> Loss:
        model = FlaxWav2Vec2ForCTC(
            config, dtype=dtype or jnp.float32, _do_init=False, input_shape=(1, 640)
        )

        def loss(params: Any, batch: Any) -> Any:
            x, labels = batch
            logits = model(x, params=params, train=False).logits
            wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
            none = jnp.zeros
            value = optax.ctc_loss(
                wide, none(logits.shape[:2]), labels, none(labels.shape)
            ).mean()
            return value, logits

        return loss

    return Case(build(None), model.params, (x, labels), build)


# ---- Haiku


def _haiku(
    forward: Callable[..., Any],
    x: Any,
    labels: Any,
    classes: tuple[Any, ...],
    full: tuple[Any, ...] = (),
) -> Case:
    """`classes` compute in half in Haiku's own mode, `full` only return half."""
    import haiku as hk
    import jmp

    net = hk.transform_with_state(forward)
    key = jax.random.key(0)
    params, state = net.init(key, x)

    def build(dtype: Any) -> Loss:
        def loss(params: Any, batch: Any) -> Any:
            x, labels, state, key = batch
            with contextlib.ExitStack() as stack:
                for cls in (*classes, *full) if dtype else ():
                    compute = jnp.float32 if cls in full else dtype
                    policy = jmp.Policy(jnp.float32, compute, dtype)
                    stack.enter_context(hk.mixed_precision.push_policy(cls, policy))
                out, new = net.apply(params, state, key, x)
            if labels is None:
                value, out = out
                return value, (out, new)
            return _xent(out, labels), (out, new)

        return loss

    return Case(build(None), params, (x, labels, state, key), build)


@program
def haiku_resnet() -> Case:
    """hk.nets.ResNet with bottleneck blocks and BatchNorm in training mode."""
    import haiku as hk

    def forward(x: Any) -> Any:
        net = hk.nets.ResNet(
            (1, 1, 1, 1), 10, bottleneck=True, channels_per_group=(16, 32, 32, 32)
        )
        return net(x, is_training=True)

    return _haiku(
        forward,
        _normal(0, 4, 32, 32, 3),
        _ints(1, 10, 4),
        (hk.nets.ResNet, hk.Conv2D, hk.Linear),
        (hk.BatchNorm,),
    )


@program
def haiku_mobilenet() -> Case:
    """hk.nets.MobileNetV1: depthwise convolutions, BatchNorm."""
    import haiku as hk

    def forward(x: Any) -> Any:
        net = hk.nets.MobileNetV1((1, 2, 2), (16, 32, 32), num_classes=10)
        return net(x, is_training=True)

    return _haiku(
        forward,
        _normal(0, 4, 32, 32, 3),
        _ints(1, 10, 4),
        (hk.Conv2D, hk.DepthwiseConv2D, hk.Linear),
        (hk.BatchNorm,),
    )


@program
def haiku_transformer() -> Case:
    """Haiku's example transformer: hk.MultiHeadAttention, hk.LayerNorm, hk.dropout."""
    import haiku as hk

    def forward(tokens: Any) -> Any:
        init = hk.initializers.VarianceScaling(2 / LAYERS)
        x = hk.Embed(VOCAB, WIDTH)(tokens)
        positions = hk.get_parameter(
            "positions", (LENGTH, WIDTH), init=hk.initializers.TruncatedNormal(0.02)
        )
        x = x + positions.astype(x.dtype)
        mask = np.tril(np.ones((1, 1, LENGTH, LENGTH)))
        for _ in range(LAYERS):
            h = hk.LayerNorm(-1, True, True)(x)
            h = hk.MultiHeadAttention(4, 12, w_init=init, model_size=WIDTH)(
                h, h, h, mask
            )
            x = x + hk.dropout(hk.next_rng_key(), 0.1, h)
            h = hk.LayerNorm(-1, True, True)(x)
            h = hk.Linear(WIDTH)(jax.nn.gelu(hk.Linear(4 * WIDTH)(h)))
            x = x + hk.dropout(hk.next_rng_key(), 0.1, h)
        return hk.Linear(VOCAB)(hk.LayerNorm(-1, True, True)(x))

    tokens = _ints(0, VOCAB, BATCH, LENGTH)
    return _haiku(
        forward,
        tokens,
        tokens,
        (hk.Linear, hk.Embed, hk.MultiHeadAttention),
        (hk.LayerNorm,),
    )


@program
def haiku_lstm() -> Case:
    """hk.LSTM under hk.dynamic_unroll."""
    import haiku as hk

    def forward(x: Any) -> Any:
        core = hk.LSTM(WIDTH)
        out, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))
        return hk.BatchApply(hk.Linear(10))(out)

    return _haiku(
        forward,
        _normal(0, LENGTH, BATCH, 20),
        _ints(1, 10, LENGTH, BATCH),
        (hk.Linear,),
    )


@program
def haiku_vqvae() -> Case:
    """hk.nets.VectorQuantizerEMA between two convolutional networks."""
    import haiku as hk

    def forward(x: Any) -> Any:
        h = hk.Conv2D(32, 4, stride=2)(x)
        h = hk.Conv2D(16, 3)(jax.nn.relu(h))
        vq = hk.nets.VectorQuantizerEMA(16, 24, 0.25, decay=0.9)(h, is_training=True)
        y = hk.Conv2DTranspose(3, 4, stride=2)(jax.nn.relu(vq["quantize"]))
        return jnp.mean((y - x) ** 2) + vq["loss"], y

    return _haiku(
        forward, _normal(0, 4, 16, 16, 3), None, (hk.Conv2D, hk.Conv2DTranspose)
    )


# ---- Equinox, and what has no half mode: by hand one casts parameters and inputs


def _to(dtype: Any, tree: Any) -> Any:
    return jax.tree.map(
        lambda x: (
            x.astype(dtype)
            if str(getattr(x, "dtype", "")) in ("float32", "float64")
            else x
        ),
        tree,
    )


def _cast_all(loss: Loss) -> Callable[[Any], Loss]:
    return lambda dtype: (
        lambda params, batch: loss(_to(dtype, params), _to(dtype, batch))
    )


def _equinox(
    model: Any,
    x: Any,
    labels: Any,
    call: Any = None,
    own: Any = None,
    value: Any = _xent,
) -> Case:
    """`own` builds `call` for a dtype; without it all parameters are cast."""
    import equinox as eqx

    params, static = eqx.partition(model, eqx.is_inexact_array)

    def build(call: Any) -> Loss:
        def loss(params: Any, batch: Any) -> Any:
            out = call(eqx.combine(params, static), batch[0])
            return value(out, batch[1]), out

        return loss

    loss = build(call or (lambda model, x: jax.vmap(model)(x)))
    by_hand = (lambda dtype: build(own(dtype))) if own else _cast_all(loss)
    return Case(loss, params, (x, labels), by_hand)


@program
def equinox_mlp() -> Case:
    """eqx.nn.MLP under vmap."""
    import equinox as eqx

    model = eqx.nn.MLP(20, 10, WIDTH, LAYERS, key=jax.random.key(0))
    return _equinox(model, _normal(0, 32, 20), _ints(1, 10, 32))


@program
def equinox_cnn() -> Case:
    """eqx.nn.Sequential of convolutions, GroupNorm and pooling."""
    import equinox as eqx

    keys = jax.random.split(jax.random.key(0), 3)
    model = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(3, 16, 3, key=keys[0]),
            eqx.nn.GroupNorm(4, 16),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.MaxPool2d(2, 2),
            eqx.nn.Conv2d(16, 32, 3, key=keys[1]),
            eqx.nn.Lambda(jax.nn.gelu),
            eqx.nn.AdaptiveAvgPool2d(1),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(32, 10, key=keys[2]),
        ]
    )
    return _equinox(model, _normal(0, 8, 3, 16, 16), _ints(1, 10, 8))


@program
def equinox_gru() -> Case:
    """eqx.nn.GRUCell in a scan, under vmap."""
    import equinox as eqx

    keys = jax.random.split(jax.random.key(0))
    model = (
        eqx.nn.GRUCell(20, WIDTH, key=keys[0]),
        eqx.nn.Linear(WIDTH, 10, key=keys[1]),
    )

    def call(model: Any, x: Any) -> Any:
        cell, out = model

        def one(xs: Any) -> Any:
            h = jnp.zeros(WIDTH, xs.dtype)
            _, hs = jax.lax.scan(lambda h, x: (cell(x, h),) * 2, h, xs)
            return jax.vmap(out)(hs)

        return jax.vmap(one)(x)

    return _equinox(
        model, _normal(0, BATCH, LENGTH, 20), _ints(1, 10, BATCH, LENGTH), call
    )


@program
def equinox_attention() -> Case:
    """eqx.nn.MultiheadAttention with rotary embeddings, LayerNorm."""
    import equinox as eqx

    keys = jax.random.split(jax.random.key(0), 3)
    model = (
        eqx.nn.Embedding(VOCAB, WIDTH, key=keys[0]),
        eqx.nn.MultiheadAttention(4, WIDTH, key=keys[1]),
        eqx.nn.LayerNorm(WIDTH),
        eqx.nn.RotaryPositionalEmbedding(12),
        eqx.nn.Linear(WIDTH, VOCAB, key=keys[2]),
    )

    def call(model: Any, tokens: Any) -> Any:
        embed, attention, norm, rope, out = model

        def rotate(q: Any, k: Any, v: Any) -> Any:
            turn = jax.vmap(rope, in_axes=1, out_axes=1)
            return turn(q), turn(k), v

        def one(tokens: Any) -> Any:
            x = jax.vmap(embed)(tokens)
            h = jax.vmap(norm)(x)
            mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
            x = x + attention(h, h, h, mask, process_heads=rotate)
            return jax.vmap(out)(x)

        return jax.vmap(one)(tokens)

    tokens = _ints(0, VOCAB, BATCH, LENGTH)
    return _equinox(model, tokens, tokens, call)


# ---- Keras


def _keras(make: Callable[[], Any], x: Any, labels: Any) -> Case:
    import keras

    keras.utils.set_random_seed(0)
    seen = make()
    params = [jnp.asarray(v.value) for v in seen.trainable_variables]
    state = [jnp.asarray(v.value) for v in seen.non_trainable_variables]

    def build(dtype: Any) -> Loss:
        model = seen
        if dtype is not None:
            name = f"mixed_{jnp.dtype(dtype).name}"
            keras.config.set_dtype_policy(name)
            try:
                keras.utils.set_random_seed(0)
                model = make()
            finally:
                keras.config.set_dtype_policy("float32")

        def loss(params: Any, batch: Any) -> Any:
            x, labels, state = batch
            logits, new = model.stateless_call(params, state, x, training=True)
            return _xent(logits, labels), (logits, new)

        return loss

    return Case(build(None), params, (x, labels, state), build)


@program
def keras_mobilenet_v2() -> Case:
    """keras.applications.MobileNetV2."""
    import keras

    def make() -> Any:
        return keras.applications.MobileNetV2(
            (32, 32, 3),
            alpha=0.35,
            weights=None,
            classes=10,
            classifier_activation=None,
        )

    return _keras(make, _normal(0, 16, 32, 32, 3), _ints(1, 10, 16))


@program
def keras_resnet() -> Case:
    """A small keras.applications ResNet (V2 blocks)."""
    from keras.src.applications import resnet

    def make() -> Any:
        def stack(x: Any) -> Any:
            x = resnet.stack_residual_blocks_v2(x, 16, 2, name="conv2")
            return resnet.stack_residual_blocks_v2(x, 32, 2, name="conv3")

        return resnet.ResNet(
            stack,
            preact=True,
            use_bias=True,
            weights_name="resnet50v2",
            weights=None,
            input_shape=(32, 32, 3),
            classes=10,
            classifier_activation=None,
        )

    return _keras(make, _normal(0, 4, 32, 32, 3), _ints(1, 10, 4))


@program
def keras_lstm() -> Case:
    """keras.layers.Embedding, Bidirectional LSTM, Dense."""
    import keras

    def make() -> Any:
        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input((LENGTH,), dtype="int32"),
                layers.Embedding(VOCAB, 20),
                layers.Bidirectional(layers.LSTM(WIDTH // 2, return_sequences=True)),
                layers.LSTM(WIDTH),
                layers.Dense(10),
            ]
        )

    return _keras(make, _ints(0, VOCAB, BATCH, LENGTH), _ints(1, 10, BATCH))


@program
def keras_attention() -> Case:
    """keras.layers.MultiHeadAttention, LayerNormalization, Dropout."""
    import keras

    def make() -> Any:
        layers = keras.layers
        tokens = keras.Input((LENGTH,), dtype="int32")
        x = layers.Embedding(VOCAB, WIDTH)(tokens)
        for _ in range(LAYERS):
            h = layers.LayerNormalization()(x)
            x = x + layers.MultiHeadAttention(4, 12)(h, h, use_causal_mask=True)
            h = layers.LayerNormalization()(x)
            h = layers.Dense(2 * WIDTH, activation="gelu")(h)
            x = x + layers.Dense(WIDTH)(h)
        return keras.Model(tokens, layers.Dense(VOCAB)(x))

    tokens = _ints(0, VOCAB, BATCH, LENGTH)
    return _keras(make, tokens, tokens)


@program
def keras_efficientnet() -> Case:
    """keras.applications.EfficientNet, a narrow and shallow one."""
    from keras.src.applications import efficientnet

    def make() -> Any:
        return efficientnet.EfficientNet(
            0.35,
            0.2,
            32,
            dropout_rate=0.0,
            drop_connect_rate=0.0,
            weights=None,
            weights_name="efficientnetb0",
            input_shape=(32, 32, 3),
            classes=10,
            classifier_activation=None,
            name="small",
        )

    return _keras(make, _normal(0, 4, 32, 32, 3), _ints(1, 10, 4))


# ---- Differential equations, probability, flows, graphs, reinforcement learning


def _networks_in_half(call: Any) -> Any:
    """By hand: the networks compute in half, the solver in float32."""

    def build(dtype: Any) -> Any:
        def halved(net: Any) -> Any:
            low = _to(dtype, net)
            return lambda y: low(y.astype(dtype)).astype(y.dtype)

        def run(model: Any, x: Any) -> Any:
            many = isinstance(model, tuple)
            return call(tuple(map(halved, model)) if many else halved(model), x)

        return run

    return build


@program
def diffrax_ode() -> Case:
    """A neural ODE, Tsit5 with adaptive steps and the recursive checkpoint adjoint."""
    import diffrax
    import equinox as eqx

    model = eqx.nn.MLP(
        4, 4, WIDTH, LAYERS, activation=jax.nn.softplus, key=jax.random.key(0)
    )
    ts = jnp.linspace(0, 1, 8)

    def call(model: Any, x: Any) -> Any:
        term = diffrax.ODETerm(lambda t, y, args: model(y))

        def one(y: Any) -> Any:
            return diffrax.diffeqsolve(
                term,
                diffrax.Tsit5(),
                0.0,
                1.0,
                0.1,
                y,
                stepsize_controller=diffrax.PIDController(1e-3, 1e-5),
                saveat=diffrax.SaveAt(ts=ts),
                max_steps=64,
            ).ys

        return jax.vmap(one)(x)

    return _equinox(
        model,
        _normal(0, 8, 4),
        _normal(1, 8, 8, 4),
        call,
        _networks_in_half(call),
        _mse,
    )


@program
def diffrax_cde() -> Case:
    """A neural CDE over a cubic interpolation, Heun with constant steps."""
    import diffrax
    import equinox as eqx

    keys = jax.random.split(jax.random.key(0), 3)
    model = (
        eqx.nn.MLP(3, 16, WIDTH, 1, jax.nn.softplus, key=keys[0]),
        eqx.nn.MLP(16, 48, WIDTH, 1, jax.nn.softplus, jnp.tanh, key=keys[1]),
        eqx.nn.Linear(16, 10, key=keys[2]),
    )
    ts = jnp.linspace(0, 1, LENGTH)

    def call(model: Any, x: Any) -> Any:
        first, field, out = model

        def one(xs: Any) -> Any:
            coefficients = diffrax.backward_hermite_coefficients(ts, xs)
            control = diffrax.CubicInterpolation(ts, coefficients)
            term = diffrax.ControlTerm(
                lambda t, y, args: field(y).reshape(16, 3), control
            ).to_ode()
            solution = diffrax.diffeqsolve(
                term, diffrax.Heun(), 0.0, 1.0, 1 / 16, first(xs[0]), max_steps=32
            )
            return out(solution.ys[-1])

        return jax.vmap(one)(x)

    return _equinox(
        model, _normal(0, 8, LENGTH, 3), _ints(1, 10, 8), call, _networks_in_half(call)
    )


@program
def diffrax_sde() -> Case:
    """A neural SDE, Euler-Heun over a virtual Brownian tree."""
    import diffrax
    import equinox as eqx

    keys = jax.random.split(jax.random.key(0))
    model = (
        eqx.nn.MLP(4, 4, WIDTH, 1, jax.nn.softplus, key=keys[0]),
        eqx.nn.MLP(4, 4, WIDTH, 1, jax.nn.softplus, jnp.tanh, key=keys[1]),
    )

    def call(model: Any, x: Any) -> Any:
        drift, diffusion = model

        def one(y: Any) -> Any:
            noise = diffrax.VirtualBrownianTree(0.0, 1.0, 1e-2, (), jax.random.key(1))
            terms = diffrax.MultiTerm(
                diffrax.ODETerm(lambda t, y, args: drift(y)),
                diffrax.ControlTerm(lambda t, y, args: diffusion(y), noise),
            )
            return diffrax.diffeqsolve(
                terms, diffrax.EulerHeun(), 0.0, 1.0, 0.1, y, max_steps=16
            ).ys

        return jax.vmap(one)(x)

    return _equinox(
        model,
        _normal(0, 8, 4),
        _normal(1, 8, 1, 4),
        call,
        _networks_in_half(call),
        _mse,
    )


@program
def numpyro_svi() -> Case:
    """SVI (Trace_ELBO) of a variational autoencoder."""
    import numpyro
    import numpyro.distributions as dist
    from jax.example_libraries import stax
    from numpyro.infer import SVI, Trace_ELBO

    encode = stax.serial(
        stax.Dense(WIDTH),
        stax.Softplus,
        stax.FanOut(2),
        stax.parallel(stax.Dense(8), stax.serial(stax.Dense(8), stax.Exp)),
    )
    decode = stax.serial(stax.Dense(WIDTH), stax.Softplus, stax.Dense(64), stax.Sigmoid)

    def model(x: Any) -> None:
        net = numpyro.module("decoder", decode, (x.shape[0], 8))
        with numpyro.plate("data", x.shape[0]):
            z = numpyro.sample("z", dist.Normal(0, 1).expand([8]).to_event(1))
            numpyro.sample("x", dist.Bernoulli(net(z)).to_event(1), obs=x)

    def guide(x: Any) -> None:
        net = numpyro.module("encoder", encode, (x.shape[0], 64))
        loc, scale = net(x)
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("z", dist.Normal(loc, scale).to_event(1))

    x = jnp.float32(_normal(0, 16, 64) > 0)
    svi = SVI(model, guide, numpyro.optim.Adam(1e-3), Trace_ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), x))

    def loss(params: Any, batch: Any) -> Any:
        x, key = batch
        value = Trace_ELBO().loss(key, params, model, guide, x)
        return value / x.shape[0], value

    return Case(loss, params, (x, jax.random.key(1)))


@program
def numpyro_hmc() -> Case:
    """The potential of HMC on a Bayesian neural network."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer.util import initialize_model

    def model(x: Any, y: Any = None) -> None:
        w1 = numpyro.sample("w1", dist.Normal(jnp.zeros((20, 32)), 1.0))
        w2 = numpyro.sample("w2", dist.Normal(jnp.zeros((32, 1)), 1.0))
        scale = 1 / jnp.sqrt(numpyro.sample("precision", dist.Gamma(3.0, 1.0)))
        mean = (jnp.tanh(x @ w1) @ w2)[:, 0]
        numpyro.sample("y", dist.Normal(mean, scale), obs=y)

    x, y = _normal(0, 64, 20), _normal(1, 64)
    info = initialize_model(
        jax.random.key(0), model, model_args=(x, y), dynamic_args=True
    )

    def loss(params: Any, batch: Any) -> Any:
        value = info.potential_fn(*batch)(params)
        return value / 64, value

    return Case(loss, info.param_info.z, (x, y))


@program
def blackjax_hmc() -> Case:
    """Steps of blackjax.hmc on a logistic regression."""
    import blackjax

    x, y = _normal(0, 64, 20), jnp.float32(_normal(1, 64) > 0)

    def loss(params: Any, batch: Any) -> Any:
        x, y, key = batch

        def density(w: Any) -> Any:
            return -optax.sigmoid_binary_cross_entropy(x @ w, y).sum() - 0.5 * jnp.sum(
                w**2
            )

        kernel = blackjax.hmc(density, 1e-2, jnp.ones(20), 5)
        state, info = jax.lax.scan(
            lambda s, k: kernel.step(k, s),
            kernel.init(params),
            jax.random.split(key, 3),
        )
        return -state.logdensity / 64, (state.position, info.energy)

    return Case(loss, 0.1 * _normal(2, 20), (x, y, jax.random.key(3)))


@program
def distrax_flow() -> Case:
    """A RealNVP of distrax.MaskedCoupling layers with Haiku conditioners."""
    import distrax
    import haiku as hk

    def forward(x: Any) -> Any:
        layers = []
        mask = jnp.arange(8) % 2 == 0
        for _ in range(4):
            net = hk.Sequential(
                [
                    hk.nets.MLP([WIDTH, WIDTH], activate_final=True),
                    hk.Linear(16),
                    hk.Reshape((8, 2)),
                ]
            )
            layers.append(
                distrax.MaskedCoupling(
                    mask,
                    net,
                    lambda p: distrax.ScalarAffine(
                        p[..., 0], log_scale=jnp.tanh(p[..., 1])
                    ),
                )
            )
            mask = ~mask
        base = distrax.Independent(distrax.Normal(jnp.zeros(8), jnp.ones(8)), 1)
        flow = distrax.Transformed(base, distrax.Inverse(distrax.Chain(layers)))
        value = flow.log_prob(x)
        return -value.mean(), value

    return _haiku(forward, _normal(0, 32, 8), None, (hk.Linear,))


@program
def flowjax_flow() -> Case:
    """flowjax.masked_autoregressive_flow with spline transformers."""
    import equinox as eqx
    import paramax
    from flowjax.bijections import RationalQuadraticSpline
    from flowjax.distributions import Normal
    from flowjax.flows import masked_autoregressive_flow

    flow = masked_autoregressive_flow(
        jax.random.key(0),
        base_dist=Normal(jnp.zeros(6)),
        nn_width=WIDTH,
        flow_layers=2,
        transformer=RationalQuadraticSpline(knots=5, interval=4),
    )
    params, static = eqx.partition(
        flow,
        eqx.is_inexact_array,
        is_leaf=lambda x: isinstance(x, paramax.NonTrainable),
    )

    def loss(params: Any, batch: Any) -> Any:
        value = paramax.unwrap(eqx.combine(params, static)).log_prob(batch)
        return -value.mean(), value

    return Case(loss, params, _normal(0, 32, 6))


@program
def jraph_gnn() -> Case:
    """jraph.GraphNetwork with Haiku MLPs and segment sums."""
    import haiku as hk
    import jraph

    def forward(x: Any) -> Any:
        nodes, edges, senders, receivers = x
        graph = jraph.GraphsTuple(
            nodes,
            edges,
            receivers,
            senders,
            jnp.zeros((2, 8)),
            jnp.array([12, 12]),
            jnp.array([40, 40]),
        )

        def update(name: str) -> Any:
            return jraph.concatenated_args(
                lambda f: hk.nets.MLP([WIDTH, 16], name=name)(f)
            )

        for i in range(LAYERS):
            net = jraph.GraphNetwork(
                update(f"edge{i}"), update(f"node{i}"), update(f"global{i}")
            )
            graph = net(graph)
        return hk.Linear(4)(graph.globals)

    x = (
        _normal(0, 24, 8),
        _normal(1, 80, 4),
        jnp.repeat(jnp.array([0, 12]), 40) + _ints(2, 12, 80),
        jnp.repeat(jnp.array([0, 12]), 40) + _ints(3, 12, 80),
    )
    return _haiku(forward, x, _ints(4, 4, 2), (hk.Linear,))


@program
def jraph_gat() -> Case:
    """jraph.GAT: a segment softmax over edges."""
    import haiku as hk
    import jraph

    def forward(x: Any) -> Any:
        nodes, senders, receivers = x
        graph = jraph.GraphsTuple(
            nodes, None, receivers, senders, None, jnp.array([24]), jnp.array([80])
        )
        net = jraph.GAT(
            lambda n: hk.Linear(WIDTH)(n),
            lambda s, r, e: jax.nn.leaky_relu(
                hk.Linear(1)(jnp.concatenate([s, r], -1))
            ),
            lambda n: jax.nn.elu(n),
        )
        return hk.Linear(4)(net(graph).nodes)

    x = (_normal(0, 24, 8), _ints(2, 24, 80), _ints(3, 24, 80))
    return _haiku(forward, x, _ints(4, 4, 24), (hk.Linear,))


@program
def rlax_dqn() -> Case:
    """rlax.double_q_learning with Haiku networks, as in its examples."""
    import haiku as hk
    import rlax

    net = hk.without_apply_rng(
        hk.transform(lambda x: hk.nets.MLP([WIDTH, WIDTH, 6])(x))
    )
    batch = (
        _normal(0, 32, 12),
        _ints(1, 6, 32),
        _normal(2, 32),
        0.9 * jnp.ones(32),
        _normal(3, 32, 12),
    )
    params = net.init(jax.random.key(0), batch[0])
    target = net.init(jax.random.key(1), batch[0])

    def build(dtype: Any) -> Loss:
        def q(params: Any, obs: Any) -> Any:
            if dtype is None:
                return net.apply(params, obs)
            return net.apply(_to(dtype, params), obs.astype(dtype)).astype(obs.dtype)

        def loss(params: Any, batch: Any) -> Any:
            obs, action, reward, discount, following, target = batch
            error = jax.vmap(rlax.double_q_learning)(
                q(params, obs),
                action,
                reward,
                discount,
                q(target, following),
                q(params, following),
            )
            return rlax.huber_loss(error).mean(), error

        return loss

    return Case(build(None), params, (*batch, target), build)


@program
def rlax_impala() -> Case:
    """V-trace actor-critic loss over an hk.LSTM."""
    import haiku as hk
    import rlax

    def forward(x: Any) -> Any:
        obs, actions, rewards, mu = x
        core = hk.LSTM(WIDTH)
        h = hk.BatchApply(hk.nets.MLP([WIDTH]))(obs)
        h, _ = hk.dynamic_unroll(core, h, core.initial_state(obs.shape[1]))
        logits = hk.BatchApply(hk.Linear(6))(h)
        values = hk.BatchApply(hk.Linear(1))(h)[..., 0]

        def one(logits: Any, values: Any, a: Any, r: Any, mu: Any) -> Any:
            rho = rlax.categorical_importance_sampling_ratios(logits[:-1], mu, a)
            out = rlax.vtrace_td_error_and_advantage(
                values[:-1], values[1:], r, 0.95 * jnp.ones_like(r), rho
            )
            w = jnp.ones_like(r)
            pg = rlax.policy_gradient_loss(logits[:-1], a, out.pg_advantage, w)
            entropy = rlax.entropy_loss(logits[:-1], w)
            return pg + 0.5 * jnp.mean(out.errors**2) + 0.01 * entropy

        value = jax.vmap(one, (1, 1, 1, 1, 1))(logits, values, actions, rewards, mu)
        return value.mean(), (logits, values)

    x = (
        _normal(0, LENGTH + 1, BATCH, 12),
        _ints(1, 6, LENGTH, BATCH),
        _normal(2, LENGTH, BATCH),
        _normal(3, LENGTH, BATCH, 6),
    )
    return _haiku(forward, x, None, (hk.Linear,))


@program
def gaussian_process() -> Case:
    """Marginal likelihood of numpyro's Gaussian process on deep features."""
    import numpyro.distributions as dist
    from jax.example_libraries import stax

    init, apply = stax.serial(stax.Dense(WIDTH), stax.Tanh, stax.Dense(4))
    _, net = init(jax.random.key(0), (-1, 6))
    params = {"net": net, "length": jnp.zeros(()), "noise": jnp.zeros(())}

    def loss(params: Any, batch: Any) -> Any:
        x, y = batch
        f = apply(params["net"], x)
        d = jnp.sum((f[:, None] - f[None]) ** 2, -1)
        k = jnp.exp(-0.5 * d * jnp.exp(-params["length"]))
        k = k + (jnp.exp(params["noise"]) + 1e-4) * jnp.eye(len(y))
        normal = dist.MultivariateNormal(jnp.zeros(len(y)), covariance_matrix=k)
        value = -normal.log_prob(y) / len(y)
        return value, jnp.linalg.solve(k, y)

    return Case(loss, params, (_normal(0, 32, 6), _normal(1, 32)))


@program
def optax_ctc() -> Case:
    """optax.ctc_loss on a convolutional acoustic model."""
    import flax.linen as nn

    module = nn.Sequential(
        [nn.Conv(WIDTH, (5,)), nn.relu, nn.Conv(WIDTH, (5,)), nn.relu, nn.Dense(20)]
    )
    x, labels = _normal(0, BATCH, 32, 13), _ints(1, 19, BATCH, 8) + 1
    params = module.init(jax.random.key(0), x)

    def loss(params: Any, batch: Any) -> Any:
        x, labels = batch
        logits = module.apply(params, x)
        wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        zeros = jnp.zeros
        value = optax.ctc_loss(
            wide, zeros(logits.shape[:2]), labels, zeros(labels.shape)
        ).mean()
        return value, logits

    return Case(loss, params, (x, labels), _cast_all(loss))


@program
def optax_triplet() -> Case:
    """A siamese network under optax's cosine and NT-Xent losses."""
    import flax.linen as nn

    module = nn.Sequential([nn.Dense(WIDTH), nn.relu, nn.Dense(16)])
    x = _normal(0, 16, 20)
    params = module.init(jax.random.key(0), x)

    def loss(params: Any, batch: Any) -> Any:
        z = module.apply(params, batch)
        wide = z.astype(jnp.promote_types(z.dtype, jnp.float32))
        value = optax.ntxent(wide, jnp.arange(16) // 2)
        return value + optax.cosine_distance(wide[::2], wide[1::2]).mean(), z

    return Case(loss, params, x, _cast_all(loss))


@program
def image_resize() -> Case:
    """A super-resolution network: jax.image.resize between convolutions."""
    import flax.linen as nn

    class Model(nn.Module):
        dtype: Any

        @nn.compact
        def __call__(self, x: Any) -> Any:
            h = nn.relu(nn.Conv(16, (3, 3), dtype=self.dtype)(x))
            shape = (*h.shape[:1], 2 * h.shape[1], 2 * h.shape[2], h.shape[3])
            h = jax.image.resize(h, shape, "bicubic")
            h = nn.ConvTranspose(16, (3, 3), dtype=self.dtype)(h)
            return nn.Conv(10, (3, 3), dtype=self.dtype)(nn.relu(h))

    return _linen(Model, _normal(0, 2, 8, 8, 3), _ints(1, 10, 2, 16, 16))


@program
def scipy_signal() -> Case:
    """A learned filter bank: jax.scipy.signal, special functions, FFT."""
    import jax.scipy as jsp

    params = {
        "bank": 0.3 * _normal(0, 8, 9),
        "out": 0.3 * _normal(1, 8, 4),
        "shape": jnp.zeros(4),
    }

    def loss(params: Any, batch: Any) -> Any:
        x, y = batch
        conv = jax.vmap(
            jax.vmap(lambda a, b: jsp.signal.convolve(a, b, mode="same"), (None, 0)),
            (0, None),
        )
        h = jsp.special.erf(conv(x, params["bank"]))
        power = jnp.abs(jnp.fft.rfft(h)) ** 2
        logits = jnp.log1p(power.mean(-1)) @ params["out"]
        alpha = jnp.exp(params["shape"]) + 1 + jax.nn.softplus(logits)
        value = -jsp.stats.dirichlet.logpdf(y.T, alpha[0]).mean()
        value = value + jsp.special.gammaln(alpha).mean()
        return value + jsp.special.logsumexp(logits), logits

    y = jax.nn.softmax(_normal(3, 6, 4))
    return Case(loss, params, (_normal(2, 6, 64), y))


@program
def optimistix_implicit() -> Case:
    """An implicit layer: optimistix.root_find, differentiated implicitly."""
    import equinox as eqx
    import optimistix

    keys = jax.random.split(jax.random.key(0), 3)
    model = (
        eqx.nn.Linear(20, 16, key=keys[0]),
        eqx.nn.Linear(16, 16, key=keys[1]),
        eqx.nn.Linear(16, 10, key=keys[2]),
    )

    def call(model: Any, x: Any) -> Any:
        first, inner, out = model
        solver = optimistix.Newton(1e-5, 1e-5)

        def one(x: Any) -> Any:
            u = first(x)
            z = optimistix.fixed_point(
                lambda z, u: jnp.tanh(inner(z) * 0.5 + u),
                solver,
                jnp.zeros(16),
                u,
                throw=False,
                max_steps=16,
            ).value
            return out(z)

        return jax.vmap(one)(x)

    return _equinox(
        model, _normal(0, 8, 20), _ints(1, 10, 8), call, _networks_in_half(call)
    )


@program
def stax_resnet() -> Case:
    """jax.example_libraries.stax: a residual network of its own example."""
    from jax.example_libraries import stax

    def block(width: int) -> Any:
        main = stax.serial(
            stax.Conv(width, (3, 3), padding="SAME"),
            stax.BatchNorm(),
            stax.Relu,
            stax.Conv(width, (3, 3), padding="SAME"),
        )
        return stax.serial(
            stax.FanOut(2), stax.parallel(main, stax.Identity), stax.FanInSum, stax.Relu
        )

    init, apply = stax.serial(
        stax.Conv(16, (3, 3), padding="SAME"),
        block(16),
        stax.AvgPool((4, 4)),
        stax.Flatten,
        stax.Dense(10),
        stax.LogSoftmax,
    )
    _, params = init(jax.random.key(0), (4, 16, 16, 3))

    def loss(params: Any, batch: Any) -> Any:
        logits = apply(params, batch[0])
        return -jnp.mean(jnp.sum(logits * batch[1], -1)), logits

    batch = (_normal(0, 4, 16, 16, 3), jax.nn.one_hot(_ints(1, 10, 4), 10))
    return Case(loss, params, batch, _cast_all(loss))


@program
def evosax_strategy() -> Case:
    """A generation of evosax OpenES over an MLP policy."""
    from evosax.algorithms import Open_ES

    params = {"w1": 0.2 * _normal(0, 12, WIDTH), "w2": 0.2 * _normal(1, WIDTH, 4)}
    strategy = Open_ES(population_size=16, solution=params)
    setup = strategy.default_params

    def loss(params: Any, batch: Any) -> Any:
        x, y, key, state = batch
        population, state = strategy.ask(key, state, setup)

        def fitness(p: Any) -> Any:
            return jnp.mean((jnp.tanh(x @ p["w1"]) @ p["w2"] - y) ** 2)

        scores = jax.vmap(fitness)(population)
        state, _ = strategy.tell(key, population, scores, state, setup)
        return fitness(params), (scores, state.mean)

    state = strategy.init(jax.random.key(0), params, setup)
    batch = (_normal(2, 32, 12), _normal(3, 32, 4), jax.random.key(4), state)
    return Case(loss, params, batch)
