"""The scenarios, and how each is searched."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.model.commands import FOLDERS, OUT, THREE, abort, commit, person, save, tree, write
from tests.model.filesystem import NONE, PER_HOST, Features
from tests.model.processes import STORAGE, World
from tests.model.search import FAILURES, Bounds, Scenario

OLD = tree("old")
NEW, OTHER, NEW_OF_THREE = tree("new"), tree("other"), tree("new", THREE)
LETTER = {"letter": b"a person's"}

NO_EXCHANGE = Features(has_exchange=False)
NO_LINKS = Features(has_links=False)
NO_LOCKS = Features(locks=NONE)
LOCKS_PER_HOST = Features(locks=PER_HOST)
LEFTOVER_WITHOUT_LOCKS = ("beside OUT is .OUT.shardkit",)
REPLACED_SINCE = ("the job was aborted by another process",)
"""With --overwrite: the job was committed, and its output replaced before a slow process of it looked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A scenario, and the searches through it."""

    scenario: Scenario
    searches: tuple[Bounds, ...]


def all_succeed(world: World) -> list[str]:
    """Every command ends with exit code 0, unless it was made to fail."""
    return [
        f"{process.name} ended with {process.outcome.kind}: {process.outcome.text}"
        for process in world.processes
        if process.outcome is not None and not process.outcome.is_ok and not process.is_faulty
    ]


def one_makes_it(world: World) -> list[str]:
    """At most one command has made OUT."""
    makers = [
        process.name
        for process in world.processes
        if process.outcome is not None and process.outcome.text == "OUT is made"
    ]
    return [f"OUT was made by each of {', '.join(makers)}"] if len(makers) > 1 else []


def refused_by_name(world: World) -> list[str]:
    """Who is refused learns the command of the other job."""
    problems = list[str]()
    for process in world.processes:
        outcome = process.outcome
        if outcome is None or outcome.is_ok or process.is_faulty:
            continue
        is_other_job = outcome.kind == "UsageError" and "it was begun by" in outcome.text
        if not is_other_job and outcome.kind != "OutputExists":
            problems.append(f"{process.name} ended with {outcome.kind}: {outcome.text}")
    return problems


def finished_files_stay(world: World) -> list[str]:
    """A job that has finished files is not removed for another one."""
    killed = [process for process in world.processes if process.is_killed]
    out, work = world.filesystem.look(OUT), world.filesystem.look("/p/.OUT.shardkit")
    if killed and killed[0].has_finished_files and out != NEW and not (work and work["done"]):
        return [f"the finished files of {killed[0].name} are gone"]
    return refused_by_name(world)


def made_or_aborted(world: World) -> list[str]:
    """The first command has made OUT, or says that it was aborted."""
    process, out = world.processes[0], world.filesystem.look(OUT)
    outcome = process.outcome
    if outcome is None:
        return []
    if outcome.kind not in ("ok", "JobEnded") or outcome.is_ok != (out == NEW):
        return [f"{process.name} ended with {outcome.kind}: {outcome.text}; OUT is {out}"]
    return []


def nothing_lost(world: World) -> list[str]:
    """A directory that a person has moved away is whole."""
    moved, out = world.filesystem.look("/p/elsewhere"), world.filesystem.look(OUT)
    if moved not in (None, OLD, NEW):
        return [f"the person has moved away {moved}"]
    return ["OUT is the old one again"] if moved is not None and out == OLD else []


def job_or_output(world: World) -> list[str]:
    """Beside OUT is at most a job that a late part has begun. Its commit removes what a kill left before that."""
    names = set(world.filesystem.look("/p")) - {"OUT"}
    if ".OUT.shardkit" in names:
        names = {name for name in names - {".OUT.shardkit"} if "-new-" not in name}
    return [f"beside OUT is {', '.join(names)}"] if names else []


def plans() -> list[Plan]:
    """Return all scenarios."""
    found = list[Plan]()

    def add(name: str, named_commands: list[tuple[str, Any]], *searches: Bounds, **options: Any) -> None:
        options.setdefault("new", [NEW])
        if not searches:
            searches = TWO_PROCESSES if len(named_commands) == 2 else RANDOM
        found.append(
            Plan(scenario=Scenario(name=name, commands=named_commands, **options), searches=searches)
        )

    begin, replace = write(), write(overwrite=True)
    a, over = ("A", begin), ("A", replace)
    b, over_b = ("B", begin), ("B", replace)
    old = {"old": OLD}
    absent = {**old, "may_be_absent": True}

    def part(number: int, num_parts: int, **options: Any) -> tuple[str, Any]:
        return f"P{number}", write(files=THREE, part=(number, num_parts), **options)

    # One process
    add("fresh", [a], *ALONE, checks=[all_succeed])
    add("overwrite", [over], *ALONE, checks=[all_succeed], **old)
    add("overwrite, no exchange", [over], *ALONE, checks=[all_succeed], features=NO_EXCHANGE, **absent)
    add("overwrite, no hard links", [over], *ALONE, checks=[all_succeed], features=NO_LINKS, **absent)
    add("damaged once", [("A", write(is_damaged_once=True))], *ALONE, checks=[all_succeed])
    add(
        "folders",
        [("A", write(files=FOLDERS, overwrite=True))],
        *ALONE,
        checks=[all_succeed],
        new=[tree("new", FOLDERS)],
        **old,
    )

    twins = {"checks": [all_succeed], "allowed": REPLACED_SINCE}
    over_files = {"old": {"x": b"old-x", "b": b"old-b", "index": b"old-index"}, "new": [tree("new", FOLDERS)]}
    in_folders = write(files=FOLDERS, overwrite=True)
    add("folders over files", [("A", in_folders)], *ALONE, checks=[all_succeed], **over_files)
    no_exchange = {"features": NO_EXCHANGE, "may_be_absent": True}
    add(
        "the same, two processes",
        [("A", in_folders), ("B", in_folders)],
        **twins,
        **over_files,
        **no_exchange,
    )

    # Several processes of a job
    power = Bounds(power_failures=24, preemptions=1)
    add("two of a job", [a, b], *TWO_PROCESSES, power, EVERY_CALL, checks=[all_succeed, one_makes_it])
    refused = write(exist_ok=False)
    add("two of a job, refused", [("A", refused), ("B", refused)], again=begin, checks=[one_makes_it])
    add("two, overwrite", [over, over_b], *TWO_PROCESSES, power, **twins, **old)
    add("two, overwrite, no exchange", [over, over_b], **twins, features=NO_EXCHANGE, **absent)
    add("two, stale handles", [over, over_b], **twins, features=Features(is_stale=True), **old)
    parts = {"new": [NEW_OF_THREE], "checks": [all_succeed, one_makes_it]}
    add("parts", [part(1, 2), part(2, 2)], *TWO_PROCESSES, power, **parts)
    late = {**parts, **twins, "checks": [all_succeed, job_or_output], "is_clean": False}
    add("parts, overwrite", [part(1, 2, overwrite=True), part(2, 2, overwrite=True)], **late, **old)
    add("parts, run again as one", [part(1, 2), part(2, 2)], again=part(1, 1)[1], **parts)

    # Another job
    other, other_over = ("J", write("other")), ("J", write("other", overwrite=True))
    both = {"new": [NEW, OTHER], "checks": [refused_by_name]}
    add("another job", [a, other], *WITHOUT_KILLS, is_rerun=False, **both)
    add("another job, overwrite", [over, other_over], **both, **old)
    unclean = {"is_always_made": False, "is_clean": False}
    add("another job after a kill", [a], Bounds(kills=2), again=write("other"), **both, **unclean)
    add(
        "another job after a kill, refused",
        [a],
        Bounds(kills=1),
        again=write("other"),
        **(both | unclean | {"checks": [finished_files_stay]}),
    )
    add("another job after a kill, overwrite", [over], Bounds(kills=1), again=other_over[1], **both, **old)
    add("another job beside a killed one, overwrite", [over, other_over], *TWO_PROCESSES, EVERY_CALL, **both)

    # Jobs without numbered files
    saved, other_saved = ("A", save(overwrite=True)), ("J", save("other", overwrite=True))
    add("a save", [("A", save())], *ALONE, checks=[all_succeed])
    add("a save, overwrite", [saved], *ALONE, checks=[all_succeed], **old)
    add("a save, no exchange", [saved], *ALONE, checks=[all_succeed], features=NO_EXCHANGE, **absent)
    add("a save after a killed one", [saved], Bounds(kills=2), again=other_saved[1], **both, **old)
    add("two saves", [saved, other_saved], *TWO_PROCESSES, power, **both, **old)
    add("two saves, no exchange", [saved, other_saved], **both, features=NO_EXCHANGE, **absent)
    lockless = {"features": NO_LOCKS, "allowed": (*LEFTOVER_WITHOUT_LOCKS, *REPLACED_SINCE)}
    add(
        "two saves, no flock", [saved, other_saved], *WITHOUT_KILLS, is_rerun=False, **both, **lockless, **old
    )
    add("a save beside another job", [saved, other_over], **both, **old)

    # Commit and abort
    ended = {"is_always_made": False, "is_rerun": False, "checks": [made_or_aborted]}
    add("a save beside abort", [saved, ("X", abort)], *WITHOUT_KILLS, **ended, **old)
    add("commit beside abort", [a, ("X", abort)], *WITHOUT_KILLS, EVERY_CALL, **ended)
    add("overwrite beside abort", [over, ("X", abort)], *WITHOUT_KILLS, **ended, **old)
    add("kill, then the command beside abort", [over, ("X", abort)], **unclean, **old)
    add("the verb commit", [a, ("V", commit())], *WITHOUT_KILLS, is_rerun=False)
    add("the verb commit, overwrite", [over, ("V", commit(overwrite=True))], **old)
    three = {"new": [NEW, OTHER], **unclean, **old}
    add(
        "a job, abort, another job", [over, ("X", abort), other_over], Bounds(preemptions=2), *RANDOM, **three
    )

    # A person
    letter = partial(STORAGE.write_file, f"{OUT}/letter", LETTER["letter"])
    makes, puts = person(partial(STORAGE.mkdir, OUT), letter), person(letter)
    theirs = {"letters": LETTER, **unclean}
    add("a person makes OUT", [a, ("person", makes)], is_kept_in_place=True, **theirs)
    add(
        "a person makes OUT, overwrite",
        [over, ("person", makes)],
        features=NO_EXCHANGE,
        may_be_absent=True,
        **theirs,
        **old,
    )
    add("a person puts a file into OUT", [over, ("person", puts)], **theirs, **old)
    add(
        "the same, no exchange",
        [over, ("person", puts)],
        features=NO_EXCHANGE,
        may_be_absent=True,
        **theirs,
        **old,
    )
    moves = person(partial(STORAGE.rename, OUT, "/p/elsewhere"))
    add("a person moves OUT away", [over, ("person", moves)], checks=[nothing_lost], **unclean, **absent)

    # Locks
    alone = {"checks": [all_succeed], "allowed": LEFTOVER_WITHOUT_LOCKS, "features": NO_LOCKS}
    add("two, no flock", [a, b], **alone)
    allowed = {"allowed": (*LEFTOVER_WITHOUT_LOCKS, *REPLACED_SINCE)}
    add("two, overwrite, no flock", [over, over_b], **(alone | allowed), **old)
    hosts = {"one_host_each": True, "features": LOCKS_PER_HOST, "allowed": REPLACED_SINCE}
    add(
        "two, overwrite, flock per host",
        [over, over_b],
        *TWO_PROCESSES,
        EVERY_CALL,
        checks=[all_succeed],
        **hosts,
        **old,
    )
    no_exchange = hosts | {"features": Features(locks=PER_HOST, has_exchange=False)}
    add("the same, no exchange either", [over, over_b], checks=[all_succeed], **no_exchange, **absent)
    both = [part(1, 2), part(2, 2)]
    # A part that fails removes the job of one on another host that has finished nothing; then a part is missing.
    removed = hosts | {
        "allowed": (*REPLACED_SINCE, *LEFTOVER_WITHOUT_LOCKS, "OUT is None in the end"),
    }
    add("parts, flock per host", both, new=[NEW_OF_THREE], checks=[all_succeed], **removed)

    # Three and more, at random
    c, over_c = ("C", begin), ("C", replace)
    add("three of a job", [a, b, c], checks=[all_succeed, one_makes_it])
    add("three, overwrite", [over, over_b, over_c], **twins, **old)
    of_three = [part(1, 3), part(2, 3), part(3, 3)]
    add("three parts", of_three, Bounds(preemptions=1), *RANDOM, **parts)
    add("three parts, flock per host", of_three, new=[NEW_OF_THREE], checks=[all_succeed], **hosts)
    add("two, another job and abort", [over, over_b, other_over, ("X", abort)], **three)
    return found


ALONE = (
    Bounds(kills=2),
    Bounds(failures=FAILURES, kills=1),
    Bounds(interrupts=True, kills=1),
    Bounds(power_failures=400),
    Bounds(power_failures=100, kills_after_power=1000),
)
WITHOUT_KILLS = (Bounds(preemptions=1), Bounds(preemptions=2), Bounds(is_random=True))
TWO_PROCESSES = (
    Bounds(preemptions=1),
    Bounds(preemptions=2),
    Bounds(preemptions=1, kills=1),
    Bounds(preemptions=1, failures=FAILURES[:1]),
    Bounds(is_random=True, kills=2),
)
RANDOM = (Bounds(is_random=True, kills=2),)
EVERY_CALL = Bounds(preemptions=2, every_call=True)
