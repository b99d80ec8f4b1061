"""While the weights move: what lies beside them is written, the model's class is asked, and all of it is checked.

The class is the one that the output's config names. A process of its own asks it whether `from_pretrained` would find
all weights.
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
from shardkit.operations.companions import BesideFile
from shardkit.operations.consolidate.assets import Asset
from shardkit.operations.consolidate.job import ConsolidateJob
from shardkit.operations.describe import OutputFiles
from shardkit.transfer.execute import FileDigest

_SWITCHED_OFF = "--ask-class off"


class HubDescriptions:
    """Writes config, tokenizer and the like, then the index.

    Args:
        job: what is being written.
        manifests: of the checkpoint. Copied files are compared with them.
        directory: where the files go.
        on_manifest: gets the manifest.
        on_written: called when all weights are on disk, before the rest is written.
        folder: not used: the weights lie beside the index everywhere.
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
        """Write the rest, the index last.

        Args:
            digests: of every file, those of an interrupted run included.
            scattered: not used: a tensor lies in one file, and its pieces have digests of their own.

        Raises:
            SourceError, ResourceError: a file beside the weights cannot be read or written.
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


def check_file(job: ConsolidateJob, directory: str, digest: FileDigest) -> None:
    """Compare the header of a finished file with what was decided; write it first where no tensor follows it.

    Args:
        job: which the file is of.
        directory: where it lies.
        digest: of the file.

    Raises:
        IntegrityError: it is something else.
        ResourceError: it cannot be read or written.
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
            f"{escape(image.name)}: what was written is not what was decided",
            hint="the disk or the file system lost it: check them, and run the same command again",
        )


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
            LAST_RANKS in job.checkpoint.remarks.notes and job.kind != "adapter" and not _is_compared(job)
        )

    def __enter__(self) -> ClassCheck:
        if self._must_know and (self._is_settled or not self._job.options.ask_class):
            raise _last_ranks()
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
            previous_lines = self._job.unloadable
            self._job = _with_answer(self._job, answer)
            self._warn(line for line in self._job.unloadable if line not in previous_lines)
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
    other_warnings = job.warnings[len(job.unloadable) :]
    # A weight that the base has is a difference even if the class does not miss it.
    differs = () if lines else job.fit.missing
    return replace(
        job, answer=answer, unloadable=unloadable, warnings=(*unloadable, *differs, *other_warnings)
    )
