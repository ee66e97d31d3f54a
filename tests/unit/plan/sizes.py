"""The three sizes that the design names, as a plan sees them."""

from dataclasses import replace

from slipstream.plan.sizes import RunSizes

A = RunSizes(
    hidden_size=4096,
    intermediate_size=12288,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151_936,
    tie_word_embeddings=False,
    num_layers=5,
    num_features=5,
    block_size=16,
    pack_tokens=4096,
    anchors_per_pack=512,
    packs_per_step=1,
    prefetch_packs=3,
    compute_bytes=2,
    wire_bytes=2,
)
"""Qwen3-8B."""
B = replace(
    A,
    hidden_size=5120,
    intermediate_size=17408,
    num_attention_heads=64,
    vocab_size=248_320,
    block_size=32,
    anchors_per_pack=1024,
)
"""The design that this one replaces, at 4096 tokens."""
C = replace(
    A,
    hidden_size=576,
    intermediate_size=1536,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    vocab_size=49_152,
    tie_word_embeddings=True,
    pack_tokens=8192,
    anchors_per_pack=1024,
)
"""SmolLM2-135M."""
SIZES = {"A": A, "B": B, "C": C}
H200_BYTES = 150_109_880_320
