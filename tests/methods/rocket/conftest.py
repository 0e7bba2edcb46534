"""A few K shots."""

import pytest


@pytest.fixture
def shots():
    rows = [
        ("Add 1 and 2.", "3", "One and two make three."),
        ("What is the capital of France?", "Paris", "Its government sits in Paris."),
        ("Name a colour.", "blue", "The sky is blue."),
        (
            "Say hello in as few letters as you can, please.",
            "hi",
            "Two letters are few.",
        ),
    ]
    return [
        {
            "prompt": prompt,
            "answer": answer,
            "rationale": why,
            "task": "own",
            "domain": "own",
        }
        for prompt, answer, why in rows
    ]
