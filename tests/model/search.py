"""The search through what processes, kills, faults and power failures can do in a scenario."""

from __future__ import annotations

import errno
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.model.filesystem import Features, FileSystem
from tests.model.processes import CHANGES, SYNCS, Command, Process, Program, World

Choice = tuple[str, int, Any]
"""(what happens, to which process, how): "step", "kill", "fail", "interrupt"; and "power" at the end of a trace."""
Trace = tuple[Choice, ...]
FAILURES = (errno.EIO, errno.ENOSPC, errno.EACCES)
_MOST_CALLS = 2000
"""Of one process: more, and it never ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Of what a search looks at. None or 0: of that nothing, or without a bound."""

    kills: int = 0
    preemptions: int | None = None
    """How often a process loses its turn though it could continue; None: any number of times."""
    failures: tuple[int, ...] = ()
    """One call fails, with each of these numbers."""
    interrupts: bool = False
    """Ctrl-C is pressed once, before or after a call."""
    power_failures: int = 0
    """So many states are tried of what a power failure may leave at one moment."""
    kills_after_power: int = 0
    """The command that follows upon a power failure is killed at so many of its calls."""
    is_random: bool = False
    """Schedules are drawn."""
    every_call: bool = False
    """A process may lose its turn also where it works in directories that no other looks into."""
    is_one_enough: bool = False
    """The search ends with the first violation."""
    max_states: int | None = None
    max_runs: int | None = None
    max_seconds: float | None = None
    """Of the processor."""

    def __str__(self) -> str:
        parts = [
            f"{self.kills} kill{'s' * (self.kills > 1)}" if self.kills else "",
            "a failing call" if self.failures else "",
            "Ctrl-C" if self.interrupts else "",
            "power" if self.power_failures else "",
            "then a kill" if self.kills_after_power else "",
            "random" if self.is_random else "",
            f"<= {self.preemptions} preemption{'s' * (self.preemptions != 1)}"
            if self.preemptions is not None
            else "",
            "every call" if self.every_call else "",
        ]
        return ", ".join(filter(None, parts)) or "all schedules"


@dataclass(slots=True, kw_only=True)
class Scenario:
    """Commands, on a file system, and what has to be true of them."""

    name: str
    commands: Sequence[tuple[str, Command]]
    """(name, what it runs). The name "person" is one whose calls neither fail nor are repeated."""
    old: dict[str, Any] | None = None
    """What is in OUT at the beginning."""
    new: Sequence[dict[str, Any]] = ()
    """What may be in OUT afterwards; the first unless several jobs run."""
    again: Command | None = None
    """What is run after a kill; by default the command that was killed."""
    is_rerun: bool = True
    """Commands are killed, and run again."""
    may_be_absent: bool = False
    """OUT may be absent though there was an old one."""
    is_always_made: bool = True
    """OUT is new in the end."""
    is_clean: bool = True
    """Nothing is beside OUT in the end."""
    letters: dict[str, bytes] = field(default_factory=dict)
    """Files of the person; once written, they stay somewhere."""
    is_kept_in_place: bool = False
    """They stay in OUT."""
    allowed: Sequence[str] = ()
    """Violations that are given up."""
    checks: Sequence[Callable[[World], list[str]]] = ()
    """What else is looked at in the end."""
    features: Features = field(default_factory=Features)
    one_host_each: bool = False
    programs: dict[tuple[int, bool, str], Program] = field(default_factory=dict)
    """All that have run, by number of the command, whether it is a rerun, and name of the process."""
    _violations: dict[tuple[int, bool], list[str]] = field(default_factory=dict)

    def start(self, *, is_tracked: bool) -> World:
        """Return the world in which all commands are about to begin."""
        filesystem = FileSystem(self.features)
        filesystem.mkdir("/p", ("setup", 1))
        if self.old is not None:
            self._put(filesystem, "/p/OUT", self.old)
        filesystem.settle()
        filesystem.is_tracked = is_tracked
        world = World(filesystem)
        for number in range(len(self.commands)):
            self.add(world, number)
        return world

    def _put(self, filesystem: FileSystem, path: str, tree: dict[str, Any]) -> None:
        filesystem.mkdir(path, ("setup", 2 + len(filesystem.directories) + len(filesystem.contents)))
        for name, content in tree.items():
            if isinstance(content, dict):
                self._put(filesystem, f"{path}/{name}", content)
            else:
                made = ("setup", 2 + len(filesystem.directories) + len(filesystem.contents))
                filesystem.write(filesystem.create(f"{path}/{name}", made), content)

    def add(self, world: World, number: int, *, is_again: bool = False, prefix: str = "") -> None:
        """Start a command."""
        label, command = self.commands[number]
        name = f"{prefix}{label}{len(world.processes) if is_again else ''}"
        key = (number, is_again, name)
        if key not in self.programs:
            host = f"host{number}" if self.one_host_each else "host"
            run = self.again if is_again and self.again is not None else command
            self.programs[key] = Program(run, name, host)
        program = self.programs[key]
        world.processes.append(Process(name, program, program.start(world.filesystem), number))

    def is_person(self, process: Process) -> bool:
        """True if it is no command."""
        return self.commands[process.number][0] == "person"

    def violations(self, world: World) -> list[str]:
        """Return what is wrong at this moment."""
        is_written = bool(self.letters) and self._person_is_done(world)
        key = (world.filesystem.visible, is_written)
        if key not in self._violations:
            self._violations[key] = self._look_for_violations(world.filesystem, is_written)
        return self._violations[key]

    def _look_for_violations(self, filesystem: FileSystem, is_written: bool) -> list[str]:
        problems = list[str]()
        out = filesystem.look("/p/OUT")
        if not out:
            if out is None and self.old is not None and not self.may_be_absent:
                problems.append("OUT is absent")
        elif isinstance(out, dict):
            written = {name: content for name, content in out.items() if name not in self.letters}
            if written and written != self.old and written not in self.new:
                problems.append(f"OUT is a mixture: {out}")
        problems += self._wrong_notes(filesystem.look("/p/.OUT.shardkit"))
        if is_written:
            if not all(_contains(filesystem.look("/p"), letter) for letter in self.letters.values()):
                problems.append("a file of the person is gone")
            if self.is_kept_in_place and not set(self.letters) <= set(out or {}):
                problems.append("a directory of the person was replaced without --overwrite")
        return problems

    def violations_at_end(self, world: World) -> list[str]:
        """Return what is wrong when all processes have ended."""
        problems = list[str]()
        for process in world.processes:
            outcome = process.outcome
            if outcome is None or self.is_person(process):
                continue
            is_interrupted = outcome.kind == "KeyboardInterrupt"
            if process.num_leaks and not is_interrupted:
                problems.append(f"{process.name} ended with open files: {outcome.kind} {outcome.text}")
            if outcome.kind.endswith("Error") and outcome.kind not in _KINDS:
                problems.append(f"{process.name} ended with {outcome.kind}: {outcome.text}")
        for check in self.checks:
            problems += check(world)
        out = world.filesystem.look("/p/OUT")
        written = {name: content for name, content in (out or {}).items() if name not in self.letters}
        if self.is_always_made and written not in self.new:
            problems.append(f"OUT is {out} in the end")
        beside = [name for name in world.filesystem.look("/p") if name != "OUT" and "-replaced-" not in name]
        if self.is_clean and beside:
            problems.append(f"beside OUT is {', '.join(beside)}")
        return problems

    def _wrong_notes(self, work: Any) -> list[str]:
        problems = list[str]()
        for name, note in (work or {}).get("done", {}).items():
            try:
                content = json.loads(note)["content"]
                path = json.loads(work["job.json"])["files"][int(name.removesuffix(".json"))][0]
            except (ValueError, KeyError):
                problems.append(f"the note {name} is broken: {note!r}")
                continue
            found = work.get("data")
            for part in path.split("/"):
                found = (found or {}).get(part)
            if found is not None and found.decode() != content:
                problems.append(f"the note {name} is not about {found!r}")
        return problems

    def _person_is_done(self, world: World) -> bool:
        return all(
            process.outcome is not None and process.outcome.text == "done"
            for process in world.processes
            if self.is_person(process)
        )


_KINDS = ("UsageError", "ResourceError", "IncompleteError")
"""Errors of shardkit that a command may end with."""


def _contains(tree: dict[str, Any], content: bytes) -> bool:
    return any(
        _contains(entry, content) if isinstance(entry, dict) else entry == content for entry in tree.values()
    )


@dataclass(slots=True)
class Result:
    """What a search has looked at, and what it has found."""

    num_states: int = 0
    num_runs: int = 0
    """Schedules to their end."""
    num_power_failures: int = 0
    num_reruns: int = 0
    """Of commands after a power failure."""
    is_complete: bool = True
    violations: Counter[str] = field(default_factory=Counter)
    traces: dict[str, Trace] = field(default_factory=dict)
    """The shortest trace of each violation."""
    num_allowed: int = 0

    def add(self, scenario: Scenario, problems: Sequence[str], trace: Trace) -> None:
        """Count violations."""
        for problem in problems:
            if any(allowed in problem for allowed in scenario.allowed):
                self.num_allowed += 1
                continue
            self.violations[problem] += 1
            if problem not in self.traces or len(trace) < len(self.traces[problem]):
                self.traces[problem] = trace


class Search:
    """A search through a scenario."""

    def __init__(self, scenario: Scenario, bounds: Bounds) -> None:
        self._scenario, self._bounds = scenario, bounds
        self._result = Result()
        self._rng = random.Random(1)
        self._seen = dict[Hashable, int]()
        self._seen_disks, self._seen_failures = set[Hashable](), set[Hashable]()
        self._until = time.process_time() + bounds.max_seconds if bounds.max_seconds else None

    def run(self) -> Result:
        """Search, and return what was found."""
        start = self._scenario.start(is_tracked=bool(self._bounds.power_failures))
        stack: list[tuple[World, Trace]] = [(start, ())]
        while stack:
            if self._is_over():
                self._result.is_complete = False
                break
            if self._bounds.is_random:
                world, trace = start.copy(), ()
            else:
                if (
                    self._bounds.preemptions is not None and len(stack) > 1
                ):  # if it is cut, it has looked everywhere
                    at = self._rng.randrange(len(stack))
                    stack[at], stack[-1] = stack[-1], stack[at]
                world, trace = stack.pop()
            self._follow(world, trace, stack)
        self._result.num_states = len(self._seen)
        return self._result

    def _is_over(self) -> bool:
        bounds, result = self._bounds, self._result
        return (
            (bounds.is_one_enough and bool(result.violations))
            or (self._until is not None and time.process_time() > self._until)
            or (bounds.max_states is not None and len(self._seen) >= bounds.max_states)
            or (bounds.max_runs is not None and result.num_runs >= bounds.max_runs)
        )

    def _follow(self, world: World, trace: Trace, stack: list[tuple[World, Trace]]) -> None:
        """Follow one schedule to its end, or to a state that was seen before; push its alternatives."""
        scenario, bounds, result = self._scenario, self._bounds, self._result
        choices = list(trace)
        has_changed = True
        while True:
            if has_changed and (problems := scenario.violations(world)):
                result.add(scenario, problems, tuple(choices))
                return
            if has_changed and bounds.power_failures:
                self._fail_power(world, tuple(choices))
            able = world.able()
            if not able:
                is_over = not any(process.is_running for process in world.processes)
                result.num_runs += 1
                problems = scenario.violations_at_end(world) if is_over else ["processes wait for each other"]
                result.add(scenario, problems, tuple(choices))
                return
            if not bounds.is_random and self._was_seen(world):
                return
            options = self._options(world, able)
            if bounds.is_random:
                choice = self._draw(options, world.last)
            else:
                choice = options.pop()
                stack += [(_after(scenario, world.copy(), option), (*choices, option)) for option in options]
            choices.append(choice)
            process = world.processes[choice[1]]
            has_changed = choice[0] != "step" or process.call[0] in CHANGES | SYNCS
            _after(scenario, world, choice)
            has_changed = has_changed or not process.is_running
            if world.last >= 0 and world.processes[world.last].node.depth > _MOST_CALLS:
                result.add(scenario, [f"{world.processes[world.last].name} never ends"], tuple(choices))
                return

    def _was_seen(self, world: World) -> bool:
        is_bounded = self._bounds.preemptions is not None
        key = world.key()
        if is_bounded:
            key = (key, world.last)
        if self._bounds.power_failures:
            key = (key, world.filesystem.durable_key())
        left = -world.num_preemptions
        if self._seen.get(key, left - 1) >= left:
            return True
        self._seen[key] = left
        return False

    def _options(self, world: World, able: list[int]) -> list[Choice]:
        """Return what may happen now; the last is that the process that has the turn continues."""
        bounds, last = self._bounds, world.last
        is_alone = len(self._scenario.commands) == 1
        is_private = not bounds.every_call and last in able and world.processes[last].is_private
        left = None if bounds.preemptions is None else bounds.preemptions - world.num_preemptions
        turns = [number for number in able if left is None or _is_preempted(world, able, number) <= left]
        options = list[Choice]()
        for number, process in enumerate(world.processes):
            if not process.is_running or self._scenario.is_person(process):
                continue
            is_changing = process.call[0] in CHANGES
            if (
                world.num_kills < bounds.kills
                and is_changing
                and process.node.depth
                and self._scenario.is_rerun
            ):
                if is_alone or not is_private:
                    options.append(("kill", number, None))
            if number in turns and not world.num_faults:
                options += [("fail", number, each) for each in bounds.failures]
                if bounds.interrupts:
                    options += [("interrupt", number, after) for after in (False, True)]
        options += [("step", number, None) for number in ([last] if is_private else turns)]
        options.sort(key=lambda option: (option[0] == "step", option[1] == last))
        return options

    def _draw(self, options: list[Choice], last: int) -> Choice:
        kills = [option for option in options if option[0] != "step"]
        steps = [option for option in options if option[0] == "step"]
        if kills and self._rng.random() < 0.01:
            return self._rng.choice(kills)
        return steps[-1] if steps[-1][1] == last and self._rng.random() < 0.6 else self._rng.choice(steps)

    def _fail_power(self, world: World, trace: Trace) -> None:
        """Let the power fail, in all ways, and run again what has not ended."""
        scenario = self._scenario
        is_made = any(
            process.outcome and process.outcome.text == "OUT is made" for process in world.processes
        )
        unfinished = [
            process.number
            for process in world.processes
            if process.is_running and not scenario.is_person(process)
        ]
        disk = world.filesystem.durable_key()
        key = (disk, tuple(unfinished), is_made)
        if key in self._seen_disks:
            return
        self._seen_disks.add(key)
        for after in world.filesystem.power_failures(self._bounds.power_failures, self._rng):
            if self._is_over():
                return
            self._result.num_power_failures += 1
            after.is_tracked = False
            key = (after.visible, tuple(unfinished), is_made)
            if key in self._seen_failures:
                continue
            self._seen_failures.add(key)
            new = World(after)
            problems = scenario.violations(new)
            if is_made and after.look("/p/OUT") not in scenario.new:
                problems.append("OUT is lost though a command has ended with it")
            here = (*trace, ("power", -1, after))
            if problems or not unfinished:
                self._result.add(scenario, problems, here)
                continue
            num_changes = self._rerun(new, unfinished, here, None)
            num_kills = min(self._bounds.kills_after_power, num_changes)
            for kill_at in self._rng.sample(range(num_changes), num_kills):
                if not self._is_over():
                    self._rerun(new, unfinished, here, kill_at)

    def _rerun(self, world: World, numbers: Sequence[int], trace: Trace, kill_at: int | None) -> int:
        """Run commands one after the other; the first is killed before its n-th change, and run again.

        Returns:
            How many changes were made.
        """
        scenario, world, todo = self._scenario, world.copy(), list(numbers)
        self._result.num_reruns += 1
        num_changes = num_started = 0
        problems = list[str]()
        while todo and not problems:
            number = todo.pop(0)
            scenario.add(world, number, prefix=f"later{num_started}")
            num_started += 1
            process = world.processes[-1]
            while process.is_running and not problems:
                is_change = process.call[0] in CHANGES
                if is_change and num_changes == kill_at:
                    world.kill(len(world.processes) - 1)
                    todo.insert(0, number)
                    kill_at = None
                    break
                num_changes += int(is_change)
                if len(world.processes) - 1 not in world.able() or process.node.depth > _MOST_CALLS:
                    problems = [f"{process.name} never ends"]
                    break
                world.step(len(world.processes) - 1)
                if is_change:
                    problems = scenario.violations(world)
        if not problems:
            problems = scenario.violations_at_end(world)
        self._result.add(scenario, [f"after a power failure: {problem}" for problem in problems], trace)
        return num_changes


def _is_preempted(world: World, able: list[int], number: int) -> bool:
    return world.last in able and number != world.last and world.processes[world.last].call[0] != "sleep"


def _after(scenario: Scenario, world: World, choice: Choice) -> World:
    """Let something happen, and start again what has ended by it."""
    kind, number, how = choice
    process = world.processes[number]
    if kind == "kill":
        world.kill(number)
        scenario.add(world, process.number, is_again=True)
        return world
    if number != world.last:
        world.num_preemptions += _is_preempted(world, world.able(), number)
    if kind == "step":
        world.step(number)
    elif kind == "fail":
        world.fail(number, how)
    else:
        world.interrupt(number, after=how)
    if process.is_faulty and process.outcome is not None:
        scenario.add(world, process.number, is_again=True)
    return world


def story(scenario: Scenario, trace: Trace) -> list[str]:
    """Return the calls of a trace, one a line."""
    world, lines = scenario.start(is_tracked=False), list[str]()
    for choice in trace:
        kind, number, how = choice
        if kind == "power":
            lines.append("the power fails")
            break
        process = world.processes[number]
        call = f"{process.call[0]}({', '.join(map(str, process.call[1:]))})"
        depth = process.node
        _after(scenario, world, choice)
        answer = next((str(key) for key, node in depth.answers.items() if node is process.node), "")
        event = {"step": "", "kill": "KILLED before ", "fail": f"FAILS ({how}): ", "interrupt": "Ctrl-C at "}[
            kind
        ]
        lines.append(f"{process.name}: {event}{call} -> {answer[:100]}")
        if process.outcome is not None:
            lines.append(f"{process.name} ends: {process.outcome.kind}, {process.outcome.text}")
    return lines
