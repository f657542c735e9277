"""The shapes that are benchmarked: GPT-2's architecture without biases and dropout, in five sizes."""

SHAPE = ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "vocab_size")
SHAPES = {  # name -> values of the settings in SHAPE
    "tiny": (4, 4, 128, 64, 12, 65), "small": (6, 6, 384, 256, 8, 50304), "gpt2": (12, 12, 768, 1024, 1, 50304),
    "gpt2_b32": (12, 12, 768, 1024, 32, 50304), "xl": (48, 25, 1600, 1024, 4, 50304),
}  # fmt: skip
