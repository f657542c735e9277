"""Text from a model: one token after another, decoded as it comes."""

import codecs

import torch

from cli.errors import ConfigError
from data.tokenizer import Tokenizer
from model import autocast


def stream(
    model, config, tokenizer, ids, n_tokens, device, generator, temperature=0.8, top_k=200, top_p=None, end=None
):
    """Yield (token id, text) n_tokens times, continuing ids; the token `end` has no text and is the last one.

    A character may take several tokens: the text is "" until it is complete, and the last pair's id is None where only
    text was left over.
    """
    characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
    idx = torch.tensor([ids], device=device)
    with autocast(config, device):
        for token in model.generate(idx, n_tokens, temperature, top_k, top_p, generator):
            if token.item() == end:
                yield end, ""
                break
            yield token.item(), characters.decode(token_bytes(tokenizer, token.item()))
    if rest := characters.decode(b"", final=True):
        yield None, rest


def token_bytes(tokenizer, token):
    """Return a token's bytes; the ids that pad a vocabulary, and those it leaves out, stand for nothing."""
    try:
        return tokenizer.decode_bytes([token])
    except ConfigError:
        return b""


def print_sample(trainer, dataset):
    """Print what the model writes from an end of text, or from the first token of validation where there is none."""
    config, device = trainer.config, trainer.device
    if not config.sample_tokens:
        return
    try:
        tokenizer = Tokenizer(dataset.tokenizer)
    except ConfigError as error:  # nanoGPT's data has nothing but a name, which may need the network: no reason to fail
        print(f"no sample: {error}")
        return
    start = tokenizer.eot if tokenizer.eot is not None else int(dataset.tokens["val"][0])
    trainer.model.eval()
    generator = torch.Generator(device).manual_seed(config.seed)
    pieces = stream(trainer.model, config, tokenizer, [start], config.sample_tokens, device, generator)
    print(f"--- a sample ({config.sample_tokens} tokens, temperature 0.8; python sample.py {config.out_dir} for more)")
    print("".join(text for _, text in pieces))
