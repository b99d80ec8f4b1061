"""Importing this has boto3 read what it says of S3: this process, and its forks, do not read it again.

Each client would, and that takes longer than all that a test asks of it.
"""

from __future__ import annotations

import functools

import boto3
from botocore.loaders import JSONFileLoader


def _read_once() -> None:
    loader, load_file = JSONFileLoader(), JSONFileLoader.load_file
    loaded = functools.cache(lambda path: load_file(loader, path))
    JSONFileLoader.load_file = lambda self, path: loaded(path)
    boto3.session.Session().client("s3", region_name="us-east-1")


_read_once()
