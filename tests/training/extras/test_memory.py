"""Memory by phase."""

import mmap
import threading
from pathlib import Path

import numpy as np
import pytest

from shardkit.errors import UsageError
from shardkit.training.extras.memory import PhaseMemory, PhaseUsage, anonymous_bytes

MIB = 1 << 20


def hold(num_mib: int) -> mmap.mmap:
    """Memory that is really there, and new: malloc might take it from what was freed before."""
    memory = mmap.mmap(-1, num_mib * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for page in range(0, len(memory), mmap.PAGESIZE):
        memory[page] = 1
    return memory


def wait_for_a_sample(memory: PhaseMemory) -> None:
    """Return when a sample was taken that began after this was called."""
    look, taken = memory._raise_cpu, threading.Semaphore(0)

    def told() -> None:
        look()
        taken.release()

    memory._raise_cpu = told  # type: ignore[method-assign]
    taken.acquire()  # it may have begun before
    taken.acquire()
    memory._raise_cpu = look  # type: ignore[method-assign]


def grown(phase: PhaseUsage) -> tuple[float, float]:
    """MiB that were still held, and held at most, beyond what was held before."""
    assert phase.cpu_before is not None
    assert phase.cpu_after is not None
    assert phase.cpu_peak is not None
    return (phase.cpu_after - phase.cpu_before) / MIB, (phase.cpu_peak - phase.cpu_before) / MIB


def test_phases_nest_and_know_their_peaks() -> None:
    kept = []
    with PhaseMemory() as memory:
        with memory.phase("load"):
            with memory.phase("read"):
                passing = hold(100)
                wait_for_a_sample(memory)
                passing.close()
            kept.append(hold(40))
        with memory.phase("after"):
            pass
    read, load, after = memory.phases
    assert [read.name, load.name, after.name] == ["load/read", "load", "after"]
    assert grown(read)[0] < 20
    assert 90 < grown(read)[1] < 130
    assert 30 < grown(load)[0] < 60
    assert 90 < grown(load)[1] < 130
    assert grown(after)[1] < 20
    assert memory.to_json()["phases"][0]["name"] == "load/read"
    lines = str(memory).splitlines()
    assert lines[0].split() == ["MiB", "cpu", "before", "cpu", "after", "cpu", "peak"]
    assert lines[1].split()[0] == "load/read"


def test_a_mark_has_the_peak_since_the_last_one() -> None:
    with PhaseMemory() as memory:
        passing = hold(60)
        wait_for_a_sample(memory)
        passing.close()
        first = memory.mark("first")
        second = memory.mark("second")
    assert 50 < grown(first)[1] < 90
    assert grown(second)[1] < 20
    assert memory.phases == [first, second]


def test_a_phase_that_fails_is_recorded() -> None:
    memory = PhaseMemory()

    def fail() -> None:
        with memory, memory.phase("broken"):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [phase.name for phase in memory.phases] == ["broken"]
    with memory, memory.phase("again"):
        pass
    assert len(memory.phases) == 2


def test_only_inside_of_with() -> None:
    memory = PhaseMemory()
    with pytest.raises(UsageError, match="only inside `with`"):
        memory.mark("x")
    with memory, pytest.raises(UsageError, match="recording already"):
        memory.__enter__()


def test_pages_of_mapped_files_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\1" * (50 * MIB))
    before = anonymous_bytes()
    mapped = np.memmap(path, dtype=np.uint8, mode="r")
    assert mapped.sum() == 50 * MIB
    after = anonymous_bytes()
    assert before is not None
    assert after is not None
    assert after - before < 20 * MIB
