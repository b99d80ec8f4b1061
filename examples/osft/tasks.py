"""Two tasks on news articles, one after the other, of excerpts of a few words.

"topics": business or politics; then sports, tech or entertainment.
"order":  all five topics; then whether the words are in their order or shuffled.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FIRST = {
    "topics": ("business", "politics"),
    "order": ("business", "politics", "sports", "tech", "entertainment"),
}
SECOND = {"topics": ("sports", "tech", "entertainment"), "order": FIRST["order"]}
NUM_WORDS = 14
"""Of an excerpt: enough to tell the topic most of the time, and quick to train on."""
SHARES = {"train": 0.6, "search": 0.15, "test": 0.25}
"""Of each topic's articles: to learn from, to choose learning rates by, and for the figures."""

Rows = list[tuple[list[str], int]]
"""Words and a label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Excerpts as a model takes them."""

    tokens: torch.Tensor
    """(number, length)"""
    mask: torch.Tensor
    """(number, length): 0 where an excerpt is shorter."""
    labels: torch.Tensor
    """(number)"""


Task = Mapping[str, Examples]
"""By the names of `SHARES`."""


def read_tasks(
    corpus: Path, tokenizer: Any, kind: str, seed: int, sizes: Mapping[str, int]
) -> tuple[Task, Task]:
    """Return the two tasks.

    Args:
        corpus: a directory for each topic, with a text file for each article.
        tokenizer: of the model.
        kind: "topics" or "order".
        seed: of the division into shares, the choice of excerpts, and what is shuffled.
        sizes: the most examples of a task, by the names of `SHARES`.
    """
    first, second = dict[str, Examples](), dict[str, Examples]()
    for name, size in sizes.items():
        rng = random.Random(f"{seed} {name}")
        first[name] = encode(tokenizer, excerpts(corpus, FIRST[kind], name, seed, rng)[:size])
        rows = excerpts(corpus, SECOND[kind], name, seed, rng)[:size]
        second[name] = encode(tokenizer, shuffled(rows, rng) if kind == "order" else rows)
    return first, second


def excerpts(corpus: Path, topics: Sequence[str], share: str, seed: int, rng: random.Random) -> Rows:
    """Return the excerpts of one share of the articles, mixed; the label is the topic's number."""
    found = [
        (words[at : at + NUM_WORDS], label)
        for label, topic in enumerate(topics)
        for words in articles(corpus / topic, share, seed)
        for at in range(0, len(words) - NUM_WORDS + 1, NUM_WORDS)
    ]
    rng.shuffle(found)
    return found


def articles(directory: Path, share: str, seed: int) -> list[list[str]]:
    """Return the words of one share of a topic's articles. No article is in two shares."""
    paths = sorted(directory.glob("*.txt"))
    random.Random(seed).shuffle(paths)
    names = list(SHARES)
    begin = sum(SHARES[name] for name in names[: names.index(share)])
    part = paths[round(begin * len(paths)) : round((begin + SHARES[share]) * len(paths))]
    return [path.read_text(errors="ignore").split() for path in part]


def shuffled(rows: Rows, rng: random.Random) -> Rows:
    """Return excerpts, every other one with its words shuffled, which is the label."""
    return [
        (rng.sample(words, len(words)) if number % 2 else words, number % 2)
        for number, (words, _) in enumerate(rows)
    ]


def encode(tokenizer: Any, rows: Rows) -> Examples:
    """Return texts and labels as tensors."""
    texts = [" ".join(words) for words, _ in rows]
    encoded = tokenizer(texts, padding=True, truncation=True, max_length=24, return_tensors="pt")
    return Examples(
        tokens=encoded["input_ids"],
        mask=encoded["attention_mask"],
        labels=torch.tensor([label for _, label in rows]),
    )
