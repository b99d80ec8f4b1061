"""While the weights move: what lies beside them is written, the model's class is asked, and all of it is checked.

The class is the one that the output's config names. A process of its own asks it whether `from_pretrained` would find
all weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from shardkit.core.catalog import FileStamp
from shardkit.core.text import count, escape
from shardkit.errors import IntegrityError, ResourceError, ShardkitError, SourceError
from shardkit.files import manifest, storage
from shardkit.files.digest import combine, crc32
from shardkit.formats.contract import OpenedHubModel
from shardkit.formats.dcp.hugging_face import LAST_RANKS
from shardkit.formats.hub.assets import CONFIG, is_weights
from shardkit.formats.hub.directory import open_weights
from shardkit.formats.hub.files import select_file, select_weights
from shardkit.formats.recorded import SourceManifests
from shardkit.layout.traced import ClassAnswer, ClassQuestion, asking
from shardkit.operations.companions import BesideFile
from shardkit.operations.consolidate.assets import Asset
from shardkit.operations.consolidate.job import ConsolidateJob
from shardkit.operations.describe import OutputFiles
from shardkit.transfer.execute import FileDigest

_PART = ".part"
_SWITCHED_OFF = "--ask-class off"


class HubDescriptions:
    """Writes config, tokenizer and the like, then the index. Then it reads everything back.

    Args:
        job: what is being written.
        manifests: of the checkpoint. Copied files are compared with them.
        directory: where the files go; the weights lie there too.
        on_manifest: gets the manifest.
        on_written: called when all weights are on disk, before the rest is written.
        shards: where the weights lie, if not in `directory`: in a store, which has compared their CRC-32s.
    """

    def __init__(
        self,
        job: ConsolidateJob,
        manifests: SourceManifests,
        directory: str,
        *,
        on_manifest: Callable[[bytes], object],
        on_written: Callable[[], object],
        shards: str | None = None,
    ) -> None:
        self._job, self._directory, self._shards = job, directory, shards or directory
        self._on_manifest = on_manifest
        self._manifests, self._has_digests = manifests, job.options.digest != "none"
        self._files = OutputFiles(directory, digest=self._has_digests, sha256=job.options.sha256)
        self._on_written = on_written
        self._hashes: dict[str, str | None] = {}

    def add_file(self, digest: FileDigest) -> None:
        """Write a header that no tensor follows, and take a finished file's sha256."""
        for image in self._job.output:
            if image.name == digest.name and not image.tensors:
                self._files.write(image.name, image.header)
        self._hashes[digest.name] = self._sha256_of(digest)

    def finish(self, digests: Mapping[str, FileDigest], scattered: Mapping[str, int]) -> None:
        """Write the rest, the index last, and check that the output is what was decided.

        Args:
            digests: of every file, those of an interrupted run included.
            scattered: not used: a tensor lies in one file, and its pieces have digests of their own.

        Raises:
            IntegrityError: it is something else.
            SourceError, ResourceError: a file beside the weights cannot be read or written.
        """
        self._on_written()
        others = [self._write_asset(asset) for asset in self._job.assets]
        self._manifests.check_copies(self._files.copies)
        index = self._job.output.index()
        if index is not None:
            others.append(self._files.describe(self._job.output.index_name, index))
        if self._job.options.is_recorded:
            self._write_manifest(digests, others)
        if index is not None:
            # The index makes a model of a directory of several files. So it gets its name only when it is whole.
            name = self._job.output.index_name
            self._files.write(name + _PART, index)
            storage.rename(os.path.join(self._directory, name + _PART), os.path.join(self._directory, name))
        if self._shards == self._directory:
            check_output(self._job, self._directory)

    def _sha256_of(self, digest: FileDigest) -> str | None:
        return self._files.sha256_of(os.path.join(self._shards, digest.name), digest.name, digest.sha256)

    def _write_manifest(self, digests: Mapping[str, FileDigest], others: list[manifest.File]) -> None:
        for name in digests.keys() - self._hashes.keys():  # of an interrupted run
            self._hashes[name] = self._sha256_of(digests[name])
        content = replace(
            self._job.describe(self._tensor_crcs(digests) if self._has_digests else {}),
            files=tuple(
                manifest.File(
                    name=image.name,
                    size=image.size,
                    crc32=digests[image.name].crc32 if image.tensors else int(crc32(image.header)),
                    sha256=self._hashes.get(image.name),
                )
                for image in self._job.output
            ),
            others=tuple(others),
        )
        data = manifest.dump(content)
        if self._job.options.manifest:
            self._files.write(manifest.NAME, data)
        self._on_manifest(data)

    def _tensor_crcs(self, digests: Mapping[str, FileDigest]) -> dict[str, int]:
        """Return the CRC-32 of every tensor: its holes are neighbours in its file, and in order."""
        tensor_crcs = dict[str, int]()
        for image in self._job.output:
            crcs = iter(digests[image.name].data_crcs)
            for tensor in image.tensors:
                holes = self._job.output.holes(tensor.fqn)
                tensor_crcs[tensor.fqn] = combine([(next(crcs), hole.nbytes) for _, hole in holes])
        return tensor_crcs

    def _write_asset(self, asset: Asset) -> manifest.File:
        """Write a file beside the weights; a module's own weights are copied block by block."""
        if asset.path is None or not is_weights(asset.name):
            return self._files.write(asset.name, asset.read(), path=asset.path)
        try:
            file = BesideFile(asset.name, FileStamp.of(storage.stat(asset.path)))
        except OSError as error:
            raise ResourceError(f"cannot copy {escape(asset.name)}: {error.strerror}") from error
        is_recorded = self._manifests.crc_of(asset.path) is not None
        return self._files.copy(file, asset.path, is_recorded=is_recorded)


def check_output(job: ConsolidateJob, directory: str) -> None:
    """Open an output as any other model is opened, and compare it with what was decided.

    Raises:
        IntegrityError: lists every tensor that is missing, there twice, or not as decided.
        ResourceError: it cannot be read.
    """
    try:
        model = _open(job, directory)
    except ResourceError:  # the disk, not what is on it
        raise
    except ShardkitError as error:
        raise IntegrityError(
            f"what was written cannot be opened: {error.message}", problems=error.problems
        ) from error
    problems = list(_differences(job, model))
    IntegrityError.raise_for(
        problems, f"what was written is not what was decided: {count(len(problems), 'difference')}"
    )


def _open(job: ConsolidateJob, directory: str) -> OpenedHubModel:
    names = [image.name for image in job.output]
    if job.output.index() is None:
        return open_weights(directory, select_file(names[0]))
    return open_weights(directory, select_weights(storage.listdir(directory), directory))


def _differences(job: ConsolidateJob, model: OpenedHubModel) -> Iterator[str]:
    written, expected = model.catalog.tensors, {tensor.fqn: tensor for tensor in job.tensors}
    for name in expected.keys() - written.keys():
        yield f"{escape(name)}: missing"
    for name in written.keys() - expected.keys():
        yield f"{escape(name)}: not expected"
    for name, tensor in expected.items():
        entry = written.get(name)
        if entry is not None and (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
            yield (
                f"{escape(name)}: {entry.dtype.name} {list(entry.shape)}, "
                f"expected {tensor.dtype.name} {list(tensor.shape)}"
            )
    sizes = {file.name: file.size for file in model.catalog.files}
    for image in job.output:
        if sizes.get(image.name) != image.size:
            yield f"{escape(image.name)}: {sizes.get(image.name)} bytes, expected {image.size}"


class ClassCheck:
    """The question to the class that the output's config names. Leaving the context ends the process that asks.

    Args:
        job: the decided job.
        warn: is told what the class says, once somebody waits for the answer.
    """

    def __init__(self, job: ConsolidateJob, warn: Callable[[Iterable[str]], None]) -> None:
        self._job, self._warn = job, warn
        self._step = ""
        self._question: ClassQuestion | None = None
        self._is_settled = not _may_ask(job)
        self._must_know = (
            LAST_RANKS in job.checkpoint.notes and job.kind != "adapter" and not _is_compared(job)
        )

    def __enter__(self) -> ClassCheck:
        if self._must_know and (self._is_settled or not self._job.options.ask_class):
            raise _last_ranks()
        if self._job.options.ask_class and not self._is_settled and self._job.answer is None:
            config = next(asset.read() for asset in self._job.assets if asset.name == CONFIG)
            shapes = {tensor.fqn: tensor.shape for tensor in self._job.tensors}
            content = json.loads(config)
            self._step, self._question = asking(content), ClassQuestion(content, shapes)
        return self

    def __exit__(self, *_: object) -> None:
        if self._question is not None:
            self._question.close()

    def settle(self) -> ConsolidateJob:
        """Wait for the answer and return the job with it. It replaces what names and shapes alone told.

        Raises:
            SourceError: files of the last ranks may be missing, and the class does not find all weights.
        """
        if not self._is_settled:
            self._is_settled = True
            if self._question is not None and self._question.is_open:
                self._job.options.tell_step(self._step)
            answer = self._question.answer() if self._question else self._job.answer
            answer = answer or ClassAnswer(failure=_SWITCHED_OFF)
            if self._must_know and (
                problems := [answer.failure] if answer.failure else list(answer.lines("it"))
            ):
                raise _last_ranks(problems)
            told = self._job.unloadable
            self._job = _with_answer(self._job, answer)
            self._warn(line for line in self._job.unloadable if line not in told)
        return self._job


def _is_compared(job: ConsolidateJob) -> bool:
    """True if names and shapes of the output are those of a base."""
    is_checked = job.base is not None and job.base.is_given and job.base.tensors is not None
    return is_checked or job.fit.is_whole


def _last_ranks(problems: Sequence[str] = ()) -> SourceError:
    return SourceError(
        f"the checkpoint may be incomplete: {LAST_RANKS}",
        problems=problems,
        hint="--base MODEL compares names and shapes with those of the model",
    )


def _may_ask(job: ConsolidateJob) -> bool:
    """True if nothing else tells: a whole model with a config, not known to have all of its base's weights."""
    is_part = (
        job.kind == "adapter"
        or job.options.keep_factors
        or job.options.naming.include
        or job.options.naming.exclude
    )
    return not (is_part or job.fit.is_whole) and any(asset.name == CONFIG for asset in job.assets)


def _with_answer(job: ConsolidateJob, answer: ClassAnswer) -> ConsolidateJob:
    if answer.failure is not None:
        note = f"the model's class was not asked whether from_pretrained finds all weights: {answer.failure}"
        return replace(job, answer=answer, notes=(*job.notes, note))
    lines = tuple(answer.lines("the output"))
    unloadable = (*job.selection.unloadable, *lines)
    others = job.warnings[len(job.unloadable) :]
    # A weight that the base has is a difference even if the class does not miss it.
    differs = () if lines else job.fit.missing
    return replace(job, answer=answer, unloadable=unloadable, warnings=(*unloadable, *differs, *others))
