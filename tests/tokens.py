"""A tokenizer that is made in a moment and knows every text."""

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: three special tokens, 256 bytes and a few merges, at most 300 tokens."""
    special = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokens = list(special.values())
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=tokens,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["### Human:\n### Assistant:\n the sum is seven"] * 3, trainer
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
