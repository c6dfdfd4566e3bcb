"""Manifests of made-up models, named as models in the wild are."""

from collections.abc import Sequence

from diloco_protocol.manifest import Kind, Manifest, TensorEntry


def tensor(name: str, *shape: int, kind: Kind = Kind.TRAINABLE) -> TensorEntry:
    return TensorEntry(name, shape, "float32", kind)


def model(**sizes: int) -> Manifest:
    """A manifest of vectors; double underscores stand for dots."""
    return Manifest(tuple(tensor(n.replace("__", "."), size) for n, size in sizes.items()))


def of_sizes(sizes: Sequence[int]) -> Manifest:
    """One tensor of each size, each in a module of its own, outside of blocks."""
    return Manifest(tuple(tensor(f"m{i:04}.weight", size) for i, size in enumerate(sizes)))


def gpt2(layers: int, width: int = 8) -> Manifest:
    """The head is tied to wte; `attn.bias` is the causal mask."""
    tied = TensorEntry(
        "transformer.wte.weight",
        (60 * width, width),
        "float32",
        Kind.TRAINABLE,
        aliases=("lm_head.weight",),
    )
    entries = [tied, tensor("transformer.wpe.weight", 20 * width, width)]
    for i in range(layers):
        h = f"transformer.h.{i}"
        entries += [
            tensor(f"{h}.ln_1.weight", width),
            tensor(f"{h}.ln_1.bias", width),
            tensor(f"{h}.attn.bias", 1, 1, width, width, kind=Kind.BUFFER),
            tensor(f"{h}.attn.c_attn.weight", width, 3 * width),
            tensor(f"{h}.attn.c_attn.bias", 3 * width),
            tensor(f"{h}.mlp.c_fc.weight", width, 4 * width),
            tensor(f"{h}.mlp.c_proj.weight", 4 * width, width),
        ]
    ends = [tensor("transformer.ln_f.weight", width), tensor("transformer.ln_f.bias", width)]
    return Manifest((*entries, *ends))


def llama(layers: int, width: int = 8, vocabulary: int = 100) -> Manifest:
    entries = [tensor("model.embed_tokens.weight", vocabulary, width)]
    for i in range(layers):
        layer = f"model.layers.{i}"
        entries += [tensor(f"{layer}.self_attn.{x}_proj.weight", width, width) for x in "qkvo"]
        entries += [
            tensor(f"{layer}.mlp.{x}_proj.weight", 3 * width, width) for x in ("up", "down")
        ]
        entries += [tensor(f"{layer}.input_layernorm.weight", width)]
    ends = [tensor("model.norm.weight", width), tensor("lm_head.weight", vocabulary, width)]
    return Manifest((*entries, *ends))


def bert(layers: int) -> Manifest:
    entries = [
        tensor("embeddings.cls_token", 1, 1, 8),
        tensor("embeddings.word_embeddings.weight", 90, 8),
        tensor("embeddings.LayerNorm.weight", 8),
        tensor("embeddings.LayerNorm.bias", 8),
    ]
    for i in range(layers):
        entries += [
            tensor(f"encoder.layer.{i}.attention.self.query.weight", 8, 8),
            tensor(f"encoder.layer.{i}.output.dense.weight", 8, 32),
        ]
    return Manifest((*entries, tensor("pooler.dense.weight", 8, 8), tensor("pooler.dense.bias", 8)))


def t5(layers: int) -> Manifest:
    entries = [tensor("shared.weight", 90, 8)]
    for side in ("encoder", "decoder"):
        for i in range(layers):
            # A second number in the name is not another block.
            entries += [tensor(f"{side}.block.{i}.layer.{part}.weight", 8, 8) for part in range(2)]
        entries += [tensor(f"{side}.final_layer_norm.weight", 8)]
    return Manifest(tuple(entries))


MODELS = {
    "gpt2": gpt2(6),
    "llama": llama(6),
    "bert": bert(6),
    "t5": t5(3),
    "sequential": model(
        **{f"{i}__{x}__weight": 8 for i in range(0, 12, 2) for x in ("norm", "linear")}
    ),
    "mlp": model(
        **{f"{layer}__{x}": 8 for layer in ("a", "b", "c", "d") for x in ("weight", "bias")}
    ),
}
