"""The steps of consolidate other than moving tensors.

- `HubDescriptions` writes config, tokenizer, index and manifest once the weights are on disk;
- `check_file` compares the header of each finished file with the plan;
- `ClassCheck` asks the model's class, in a separate process while bytes move, whether `from_pretrained` would find all
  weights of the output. The class is the one that the output's config names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from shardkit.core.catalog import FileStamp
from shardkit.core.text import escape
from shardkit.errors import IntegrityError, ResourceError, SourceError
from shardkit.files import manifest, storage
from shardkit.files.digest import combine, crc32
from shardkit.formats.dcp.hugging_face import LAST_RANKS
from shardkit.formats.hub.assets import CONFIG, is_weights
from shardkit.formats.recorded import SourceManifests
from shardkit.layout.traced import ClassAnswer, ClassQuestion, asking_text
from shardkit.operations.companions import FileToCopy
from shardkit.operations.consolidate.assets import Asset
from shardkit.operations.consolidate.job import ConsolidateJob
from shardkit.operations.describe import OutputFiles
from shardkit.transfer.execute import FileDigest

_SWITCHED_OFF = "--ask-class off"


class HubDescriptions:
    """Writes config, tokenizer and the like, then the index.

    Args:
        job: the consolidation.
        manifests: the checkpoint's manifests. Copied files are compared with them.
        directory: where the files go.
        on_manifest: called with the manifest's bytes.
        on_written: called when all weights are on disk, before the other files are written.
        folder: not used: the index is always in the same directory as the weights.
    """

    def __init__(
        self,
        job: ConsolidateJob,
        manifests: SourceManifests,
        directory: str,
        *,
        on_manifest: Callable[[bytes], object],
        on_written: Callable[[], object],
        folder: str = "",
    ) -> None:
        self._job, self._on_manifest = job, on_manifest
        self._manifests, self._has_digests = manifests, job.options.digest != "none"
        self._files = OutputFiles(directory, digest=self._has_digests, sha256=job.options.sha256)
        self._on_written = on_written

    def finish(self, digests: Mapping[str, FileDigest], scattered: Mapping[str, int]) -> None:
        """Write the other files: config, tokenizer and the like, then the index, then the manifest.

        Args:
            digests: digest of every weight file, including files that an interrupted run has finished.
            scattered: not used: a tensor is in one file, and its pieces have their own digests.

        Raises:
            SourceError, ResourceError: one of these files cannot be read or written.
        """
        self._on_written()
        other_files = [self._write_asset(asset) for asset in self._job.assets]
        self._manifests.check_copies(self._files.copies)
        index = self._job.output.index()
        if index is not None:
            other_files.append(self._files.write(self._job.output.index_name, index))
        if self._job.options.is_recorded:
            self._write_manifest(digests, other_files)

    def _write_manifest(self, digests: Mapping[str, FileDigest], other_files: list[manifest.File]) -> None:
        content = replace(
            self._job.describe(self._tensor_crcs(digests) if self._has_digests else {}),
            files=tuple(
                manifest.File(
                    name=image.name,
                    size=image.size,
                    crc32=digests[image.name].crc32 if image.tensors else int(crc32(image.header)),
                    sha256=digests[image.name].sha256,
                )
                for image in self._job.output
            ),
            others=tuple(other_files),
        )
        data = manifest.dump(content)
        if self._job.options.manifest:
            self._files.write(manifest.NAME, data)
        self._on_manifest(data)

    def _tensor_crcs(self, digests: Mapping[str, FileDigest]) -> dict[str, int]:
        """Return the CRC-32 of every tensor, combined from its holes, which follow each other in its file."""
        tensor_crcs = dict[str, int]()
        for image in self._job.output:
            crcs = iter(digests[image.name].data_crcs)
            for tensor in image.tensors:
                holes = self._job.output.holes(tensor.fqn)
                tensor_crcs[tensor.fqn] = combine([(next(crcs), hole.nbytes) for _, hole in holes])
        return tensor_crcs

    def _write_asset(self, asset: Asset) -> manifest.File:
        """Write an asset. Weights that a module brings from the base are copied block by block."""
        if asset.path is None or not is_weights(asset.name):
            return self._files.write(asset.name, asset.read(), path=asset.path)
        try:
            file = FileToCopy(asset.name, FileStamp.of(storage.stat(asset.path)))
        except OSError as error:
            raise ResourceError(f"cannot copy {escape(asset.name)}: {error.strerror}") from error
        is_recorded = self._manifests.crc_of(asset.path) is not None
        return self._files.copy(file, asset.path, is_recorded=is_recorded)


def check_file(job: ConsolidateJob, directory: str, digest: FileDigest) -> None:
    """Compare the header and size of a finished file with the plan. A file without tensors is written here.

    Args:
        job: the consolidation.
        directory: the file's directory.
        digest: the file's digest; gives its name.

    Raises:
        IntegrityError: the header or the size differs.
        ResourceError: the file cannot be read or written.
    """
    image = next(image for image in job.output if image.name == digest.name)
    path = os.path.join(directory, image.name)
    try:
        if not image.tensors:
            storage.write_file(path, image.header)
        with storage.open_file(path, "rb") as file:
            header, size = file.read(len(image.header)), storage.fstat(file.fileno()).st_size
    except OSError as error:
        raise ResourceError(f"cannot read {escape(image.name)} back: {error.strerror}") from error
    if header != image.header or size != image.size:
        raise IntegrityError(
            f"{escape(image.name)}: the file on disk differs from what was written",
            hint="the disk or the file system lost it: check them, and run the same command again",
        )


class ClassCheck:
    """Asks the class that the output's config names whether it would load all weights.

    A context manager: entering it starts the process that asks, leaving it ends that process.

    Args:
        job: the consolidation.
        warn: called with the class's complaints when `settle` gets the answer.
    """

    def __init__(self, job: ConsolidateJob, warn: Callable[[Iterable[str]], None]) -> None:
        self._job, self._warn = job, warn
        self._step = ""
        self._question: ClassQuestion | None = None
        self._is_settled = not _only_class_knows(job)
        # Files of the last ranks may be missing, and neither names nor shapes were compared with a base: only the class
        # can show that the output is complete.
        self._must_know = (
            LAST_RANKS in job.checkpoint.remarks.notes and job.kind != "adapter" and not _is_compared(job)
        )

    def __enter__(self) -> ClassCheck:
        if self._must_know and (self._is_settled or not self._job.options.ask_class):
            raise _incomplete_error()
        if self._job.options.ask_class and not self._is_settled and self._job.answer is None:
            config = next(asset.read() for asset in self._job.assets if asset.name == CONFIG)
            shapes = {tensor.fqn: tensor.shape for tensor in self._job.tensors}
            content = json.loads(config)
            self._step, self._question = asking_text(content), ClassQuestion(content, shapes)
        return self

    def __exit__(self, *_: object) -> None:
        if self._question is not None:
            self._question.close()

    def settle(self) -> ConsolidateJob:
        """Wait for the answer and return the job with it. It replaces the warnings from comparing names and shapes.

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
                raise _incomplete_error(problems)
            previous_lines = self._job.unloadable
            self._job = _with_answer(self._job, answer)
            self._warn(line for line in self._job.unloadable if line not in previous_lines)
        return self._job


def _is_compared(job: ConsolidateJob) -> bool:
    """True if the names and shapes of the output were compared with a base's."""
    is_checked = job.base is not None and job.base.is_given and job.base.tensors is not None
    return is_checked or job.fit.has_all_weights


def _incomplete_error(problems: Sequence[str] = ()) -> SourceError:
    return SourceError(
        f"the checkpoint may be incomplete: {LAST_RANKS}",
        problems=problems,
        hint="--base MODEL compares names and shapes with those of the model",
    )


def _only_class_knows(job: ConsolidateJob) -> bool:
    """True if only the class can answer: for a whole model with a config, unless the base's weights are all there."""
    is_part = (
        job.kind == "adapter"
        or job.options.keep_factors
        or job.options.naming.include
        or job.options.naming.exclude
    )
    return not (is_part or job.fit.has_all_weights) and any(asset.name == CONFIG for asset in job.assets)


def _with_answer(job: ConsolidateJob, answer: ClassAnswer) -> ConsolidateJob:
    """Return the job with the class's answer, its complaints as the first warnings, or a note why it gave none."""
    if answer.failure is not None:
        note = f"the model's class was not asked whether from_pretrained finds all weights: {answer.failure}"
        return replace(job, answer=answer, notes=(*job.notes, note))
    lines = tuple(answer.lines("the output"))
    unloadable = (*job.selection.unloadable, *lines)
    other_warnings = job.warnings[len(job.unloadable) :]
    # If the class misses nothing, weights of the base that the output lacks are still differences.
    differs = () if lines else job.fit.missing
    return replace(
        job, answer=answer, unloadable=unloadable, warnings=(*unloadable, *differs, *other_warnings)
    )
