"""From what went wrong to exit codes and words, for people and as JSON."""

from __future__ import annotations

import json
import signal
import sys
import threading

import pytest
import torch

from shardkit import errors
from shardkit.cli.errors import resume_command
from tests.cases import but_first
from tests.operations.consolidate.checkpoints import save

PROBLEMS = [f"tensor {n}" for n in range(25)]

# what is raised, exit code, lines on stderr
CASES = {
    "usage": (errors.UsageError("bad option"), 2, ["error: bad option"]),
    "mesh": (errors.MeshError("bad mesh"), 2, ["error: bad mesh"]),
    "source": (
        errors.SourceError("damaged", problems=["a: short"], hint="download it again"),
        3,
        ["error: damaged", "  a: short", "hint: download it again"],
    ),
    "many": (
        errors.LayoutError("25 differ", problems=PROBLEMS),
        3,
        ["error: 25 differ", *(f"  {p}" for p in PROBLEMS[:20]), "  ... 5 more, see -v or --json"],
    ),
    "incomplete": (errors.IncompleteError("stopped"), 4, ["error: stopped"]),
    "resource": (errors.ResourceError("disk full"), 5, ["error: disk full"]),
    "os": (PermissionError(13, "Permission denied", "/x\n"), 5, ["error: /x\\n: Permission denied"]),
    "memory": (
        MemoryError(),
        5,
        [
            "error: out of memory",
            "hint: lower --max-memory or --jobs, or use a machine with more memory",
        ],
    ),
    "bug": (
        ValueError("two\nlines"),
        70,
        [
            "internal error: ValueError: two\\nlines; please report it with the output of `shardkit env`; "
            "SHARDKIT_DEBUG=1 shows where it happened"
        ],
    ),
    "ctrl-c": (KeyboardInterrupt(), 130, ["interrupted: stopped by SIGINT"]),
    "sigterm": (errors.Terminated(), 143, ["interrupted: stopped by SIGTERM"]),
}


@pytest.fixture
def fail(run, monkeypatch):
    """Run a command that raises."""

    def failing(error, *args):
        def raise_it():
            raise error

        monkeypatch.setattr("shardkit.operations.environment.environment", raise_it)
        return run("env", *args)

    return failing


@pytest.mark.parametrize("case", CASES)
def test_for_people(fail, case):
    error, code, lines = CASES[case]
    result = fail(error)
    assert (result.exit_code, result.stdout, result.stderr.splitlines()) == (code, "", lines)


def test_threads_that_may_not_be_started(fail):
    """As under `ulimit -v 200000`: here the stack of one is larger than what any machine can map."""
    before = threading.stack_size(1 << 50)
    try:
        with pytest.raises(RuntimeError) as caught:
            threading.Thread(target=int).start()
    finally:
        threading.stack_size(before)
    result = fail(caught.value)
    assert result.exit_code == 5
    assert "a system limit" in result.stderr
    assert "`ulimit -v`" in result.stderr


def test_a_traceback_folds_as_the_command_line_does(fail):
    """Every problem stays in `problems`: what is folded is only what people read."""
    lines = [f"layers.{n}.up.weight in rank_{rank}.pt" for n in range(36) for rank in range(8)]
    error = errors.LayoutError("288 differ", problems=[*lines, *PROBLEMS], hint="use another copy")
    shown = ["  layers.{0..35}.up.weight in rank_{0..7}.pt", *(f"  {each}" for each in PROBLEMS[:19])]
    assert str(error).splitlines() == ["288 differ", *shown, "  ... 6 more", "hint: use another copy"]
    assert fail(error).stderr.splitlines()[1:-2] == shown
    assert error.problems == (*lines, *PROBLEMS)


@pytest.mark.parametrize("case", CASES)
def test_as_json(fail, case):
    error, code, lines = CASES[case]
    result = fail(error, "--json")
    assert result.exit_code == code
    assert result.stderr.splitlines() == lines  # in addition
    content = json.loads(result.stdout)
    assert list(content) == ["error", "message", "problems", "hint", "exit_code"]
    assert content["exit_code"] == code
    assert content["problems"] == list(getattr(error, "problems", ()))


@pytest.mark.parametrize(
    "args", [["bogus"], ["inspect"], ["inspect", "a", "--bogus"], ["preshard", "a", "--dtype", "x"]]
)
def test_click_usage_errors(run, args):
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert "hint: `shardkit " in result.stderr
    content = json.loads(run(*args, "--json").stdout)
    assert (content["error"], content["exit_code"]) == ("UsageError", 2)


@pytest.mark.parametrize(
    ("typed", "said", "usage"),
    [
        ("inspct", "no such command 'inspct'  (closest name: inspect)", "[OPTIONS] COMMAND [ARGS]..."),
        (
            "preshard a --world-sizes 2",
            "no such option '--world-sizes'  (closest name: --world-size)",
            "preshard [OPTIONS] SOURCE [OUTPUT]",
        ),
        (
            "preshard a --world-size",
            "option '--world-size' requires an argument",
            "preshard [OPTIONS] SOURCE [OUTPUT]",
        ),
        (
            "preshard a --dtype bf1",
            "invalid value for '--dtype': 'bf1' is not one of 'keep', 'bf16', 'fp16', 'fp32'  (closest name: bf16)",
            "preshard [OPTIONS] SOURCE [OUTPUT]",
        ),
        (
            "completion",
            "missing argument 'SHELL'. Choose from: bash, zsh, fish",
            "completion [OPTIONS] SHELL",
        ),
        (
            "completion fisch",
            "invalid value for 'SHELL': 'fisch' is not one of 'bash', 'zsh', 'fish'  (closest name: fish)",
            "completion [OPTIONS] SHELL",
        ),
    ],
)
def test_what_click_refuses_reads_like_any_other_error(run, typed, said, usage):
    path = " ".join(["shardkit", *usage.partition("[")[0].split()])
    assert run(*typed.split()).stderr.splitlines() == [
        f"error: {said}",
        f"  usage: shardkit {usage}",
        f"hint: `{path} --help` shows its options",
    ]


def test_traceback_only_on_request(fail, monkeypatch):
    assert "Traceback" not in fail(ValueError("x")).stderr
    assert "Traceback" not in fail(ValueError("x"), "-v").stderr
    monkeypatch.setenv("SHARDKIT_DEBUG", "1")
    assert "Traceback" in fail(ValueError("x")).stderr


def test_an_error_is_said_once_below_its_traceback(fail, monkeypatch):
    monkeypatch.setenv("SHARDKIT_DEBUG", "1")
    cause = OSError(5, "of the disk")
    error = errors.SourceError("it is damaged", problems=["a: short"], hint="download it again")
    error.__cause__ = cause
    lines = fail(error).stderr.splitlines()
    assert lines[-3:] == ["error: it is damaged", "  a: short", "hint: download it again"]
    assert sum("it is damaged" in line for line in lines) == 1
    assert sum("of the disk" in line for line in lines) == 1
    assert "Traceback (most recent call last):" in lines


@pytest.mark.parametrize("flag", ["-q", "--quiet", "-v", "--verbose", "--json"])
def test_a_flag_before_the_command_is_one_of_the_command(flag, run, tiny):
    before, behind = run(flag, "inspect", "tiny"), run("inspect", "tiny", flag)
    assert before.exit_code == behind.exit_code == 0
    assert before.stdout == behind.stdout


def test_quiet_and_verbose_exclude_each_other(run, tiny):
    result = run("inspect", "tiny", "-q", "-v")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --quiet and --verbose exclude each other\n")


def test_verbose_lists_whole(run, tiny):
    names = [f"tokenizer_{letter}.json" for letter in "abcdefghi"]
    for name in names:
        (tiny / name).write_text("{}")
    args = ("preshard", "tiny", "--world-size", "2", "--wrap", "none", "-n")
    assert "..." in run(*args).stdout
    whole = run(*args, "-v").stdout
    assert ", ".join(names) in whole
    assert "..." not in whole
    assert "..." in run(*args).stdout


def test_interrupted_run_prints_the_resume_command(fail, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/nowhere/bin/shardkit"])
    error = errors.Interrupted("interrupted: x was not made", signum=2, hint="run it again")
    result = fail(error, "--json")
    assert result.stderr.splitlines() == [
        "interrupted: x was not made",
        "resume: /nowhere/bin/shardkit env --json",
    ]
    assert json.loads(result.stdout)["resume_command"] == "/nowhere/bin/shardkit env --json"
    assert result.exit_code == 130


def test_resume_command_is_quoted(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/site/shardkit/__main__.py", "preshard", "a b"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "shardkit", "preshard", "a b"])
    assert resume_command(["preshard", "a b"]) == "python -m shardkit preshard 'a b'"


def test_closed_stdout_is_quiet(ended, tiny):
    # A reader that leaves at once: the pipe is closed before anything is written.
    code = (
        "import os, sys; os.dup2(os.open('/dev/null', 0), 0); r, w = os.pipe(); os.close(r); os.dup2(w, 1); "
    )
    code += "from shardkit.cli import main; main(['inspect', 'tiny'])"
    assert ended("-c", code) == (141, "", "")


@pytest.mark.parametrize(
    "args", [("inspect", "tiny"), ("inspect", "tiny", "--json"), ("--version",), ("--help",)]
)
def test_full_stdout_is_an_error_that_says_so(ended, tiny, args):
    with open("/dev/full", "w") as full:
        code, _, said = ended("-m", "shardkit", *args, stdout=full)
    wanted = "error: the result cannot be printed: No space left on device (nothing else failed)\n"
    assert (code, said) == (5, wanted)


def test_full_stderr_does_not_stop_a_command(ended, tmp_path):
    save({"model": {"a.weight": torch.ones(2)}}, tmp_path / "step-1")
    with open("/dev/full", "w") as full:
        code, printed, _ = ended("-m", "shardkit", "consolidate", "step-1", stderr=full)
        assert code == 0  # it had to warn that there is no config.json
        assert printed.startswith("wrote ")
        assert ended("-m", "shardkit", "inspect", "nowhere", stdout=full, stderr=full)[0] == 3


def test_current_directory_that_is_gone(ended, tmp_path):
    (tmp_path / "gone").mkdir()
    code = f"import os; os.chdir({str(tmp_path / 'gone')!r}); os.rmdir({str(tmp_path / 'gone')!r}); "
    said = "error: the current directory is gone\nhint: cd to one that exists\n"
    assert ended("-c", code + "from shardkit.cli import main; main(['inspect', '.'])") == (5, "", said)


def test_signal_handlers_are_put_back(run, tiny):
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    run("env")
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before


def test_second_signal_stops_at_once(ended):
    code = """
import os, signal
from shardkit.cli import signals_raised
with signals_raised():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        os.kill(os.getpid(), signal.SIGINT)
        print("still here")
"""
    assert ended("-c", code) == (130, "", "")


@pytest.mark.parametrize(("signum", "code"), but_first([(signal.SIGINT, 130), (signal.SIGTERM, 143)]))
def test_a_signal_while_the_result_is_printed_adds_nothing_to_it(signum, code, ended, tiny):
    """The work is done, and a second document breaks the first."""
    program = f"""
import builtins, os
from shardkit.cli import main
plain = print
def print_and_stop(*args, **options):
    plain(*args, **options)
    os.kill(os.getpid(), {int(signum)})
builtins.print = print_and_stop
main(["preshard", "tiny", "out", "--world-size", "2", "--json"])
"""
    returncode, out, err = ended("-c", program)
    assert (returncode, err) == (code, "")
    assert json.loads(out)["output"] == str(tiny.parent / "out")
    assert (tiny.parent / "out" / ".metadata").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "https://example.org/model"),
        ("consolidate", "http://example.org/run", "out"),
        ("diff", "tiny", "ftp://example.org/model"),
        ("preshard", "tiny", "https://example.org/out", "--world-size", "2"),
    ],
)
def test_an_address_that_is_no_store_is_no_path(words, run, tiny):
    """It was taken for a directory, with the hint to make it."""
    result = run(*words)
    assert result.exit_code in (2, 3), result.output
    assert "no such address" in result.stderr
    assert "begins with s3://" in result.stderr or "begin with s3://" in result.stderr


@pytest.mark.parametrize("address", ["https://example.org/m.json", "s3://bucket/m.json"])
def test_what_lies_beside_an_output_is_local(address, run, tiny):
    result = run("consolidate", "tiny", "out", "--manifest-file", address)
    assert result.exit_code == 2, result.output
    assert f"{address}: this is written to local paths alone" in result.stderr
    assert "choose a local path" in result.stderr
