"""Sizes that the tests' random models share; a test that needs another says so beside them."""

# Two layers of width 32, with the tokens of `tests.tokens.byte_tokenizer`.
SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
