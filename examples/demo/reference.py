"""The whole model in one process, loaded as everyone loads it: the embedding that the ranks must reproduce.

python examples/demo/reference.py MODEL EMBEDDING
"""

from __future__ import annotations

import sys

from sentence import embed, write_embedding
from transformers import AutoModel
from transformers.utils import logging


def main(model_directory: str, embedding_path: str) -> None:
    """Write the unsharded model's embedding."""
    logging.disable_progress_bar()
    model = AutoModel.from_pretrained(model_directory)
    write_embedding(embed(model, model_directory), embedding_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
