"""The options of consolidate."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal

from shardkit.core.dtypes import Cast
from shardkit.core.text import MIB, escape, parse_size
from shardkit.core.threads import OnStep, silent
from shardkit.errors import UsageError
from shardkit.files import stores
from shardkit.files.location import location_of
from shardkit.formats.hub.tokenizer import Tokenizer, open_tokenizer
from shardkit.keys.select import Naming
from shardkit.operations.casts import DtypeRule, parse_rules
from shardkit.operations.options import WriteOptions

_CONFIGS = ("checkpoint", "base")
_SHARD_SIZE = "5GB"  # as transformers and huggingface_hub have it


@dataclass(frozen=True, kw_only=True)
class ConsolidateOptions(WriteOptions):
    """The keywords of `consolidate`."""

    verb: ClassVar[str] = "consolidate"
    checkpoint: str | os.PathLike[str] = field(kw_only=False)
    output: str | os.PathLike[str] | None = field(default=None, kw_only=False)
    base: str | os.PathLike[str] | None = None
    base_revision: str | None = None
    config: Literal["checkpoint", "base"] = "checkpoint"
    tokenizer: str | os.PathLike[str] | None = None
    dtype: Cast | Literal["base"] = "keep"
    dtype_rules: Sequence[str] = ()
    max_shard_size: str | int | None = None
    single_file: bool = False
    weights: str = "model"
    root: str | None = None
    strip_prefix: Sequence[str] = ()
    add_prefix: str = ""
    rename: Sequence[str] = ()
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    fill_from_base: Sequence[str] = ()
    allow_missing: bool = False
    allow_unexpected: bool = False
    keys: str | os.PathLike[str] = "auto"
    ask_class: bool = True
    dequantize: bool = False
    quantize: Literal["base"] | None = None
    keep_factors: bool = False
    merge_lora: bool = False
    adapter_config: str | None = None
    manifest: bool = False
    manifest_file: str | os.PathLike[str] | None = None
    strict: bool = False
    max_memory: str | int = 256 * MIB
    push_to_hub: str | None = None
    private: bool = False
    branch: str | None = None
    on_step: OnStep | None = None

    @cached_property
    def naming(self) -> Naming:
        """Which tensors are written, and how their names change."""
        return Naming(
            weights=self.weights,
            root=self.root,
            strip_prefix=tuple(self.strip_prefix),
            add_prefix=self.add_prefix,
            rename=tuple(self.rename),
            include=tuple(self.include),
            exclude=tuple(self.exclude),
        )

    @cached_property
    def rules(self) -> tuple[DtypeRule, ...]:
        """The parsed `dtype_rules`."""
        return parse_rules(self.dtype_rules)

    @property
    def tell_step(self) -> OnStep:
        """The callback `on_step`; does nothing if it is None."""
        return self.on_step or silent

    @property
    def key_rules(self) -> str:
        """The option `keys`: "auto" for a shipped set that matches all names, "none", a file, or a shipped set."""
        return os.fspath(self.keys)

    @property
    def follows_base(self) -> bool:
        """True if the tensors are divided over files as in the base, provided that it has the same tensors."""
        return self.max_shard_size is None and not self.single_file

    @property
    def max_shard_bytes(self) -> int | None:
        """Maximum bytes of tensors per file; None writes one file."""
        if self.single_file:
            return None
        return parse_size(_SHARD_SIZE if self.max_shard_size is None else self.max_shard_size)

    @cached_property
    def new_tokenizer(self) -> Tokenizer | None:
        """The tokenizer that replaces the base's; None if the user named none."""
        return None if self.tokenizer is None else open_tokenizer(stores.as_path(self.tokenizer))

    @property
    def is_recorded(self) -> bool:
        """True if a manifest will be written."""
        return self.manifest or self.manifest_file is not None

    def check(self) -> None:
        """As `WriteOptions.check`.

        Raises:
            UsageError: two options contradict each other, or a value is not allowed.
            SourceError: `tokenizer` is not a tokenizer.
            ResourceError: huggingface_hub is missing.
        """
        super().check()
        _ = self.rules, self.new_tokenizer  # raises if one is invalid
        most = self.max_shard_bytes
        if most is not None and most < 1:
            raise UsageError(f"--max-shard-size must be at least one byte, not {self.max_shard_size}")
        if self.base_revision is not None and self.base is None:
            raise UsageError("--base-revision belongs to --base, which is not given")
        if self.config not in _CONFIGS:
            raise UsageError(f"--config {escape(self.config)!r} is not one of {', '.join(_CONFIGS)}")
        if self.config == "base" and self.base is None:
            raise UsageError("--config base needs a base: name it with --base")
        if self.quantize is not None:
            self._check_quantize(self.quantize)
        if self.sha256 and not self.is_recorded:
            raise UsageError(
                "--sha256 goes into a manifest, and none is to be written",
                hint="add --manifest, or --manifest-file FILE",
            )
        self._check_push()

    def _check_quantize(self, quantize: str) -> None:
        """Refuse `--quantize` without a base, or with options about dtypes, which the base decides."""
        if quantize != "base":
            raise UsageError(f"--quantize {escape(quantize)!r} is not base")
        if self.base is None:
            raise UsageError("--quantize base needs a base: name it with --base")
        if self.dtype not in ("keep", "base") or self.dtype_rules:
            raise UsageError(
                "--quantize base takes all dtypes from the base", hint="leave out --dtype and --dtype-rule"
            )

    def _check_push(self) -> None:
        """Refuse an upload that cannot succeed, and options of an upload without `--push-to-hub`."""
        if self.push_to_hub is None:
            if self.private or self.branch is not None:
                raise UsageError("--private and --branch belong to --push-to-hub, which is not given")
            return
        if not location_of(self.output).is_for_all:
            raise UsageError(
                "--push-to-hub uploads a local directory, and the output goes into a store",
                hint="leave one of the two out",
            )
        from shardkit.formats.hub.repo import check_push

        check_push(self.push_to_hub, is_tried=self.dry_run)
