"""Real trainers on two CPU ranks save every 5 steps and keep the last 2, while `shardkit watch` publishes."""

from __future__ import annotations

import json
import pickle
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

import shardkit
from shardkit.operations.watch.record import RECORD
from tests.contents import contents
from tests.test_examples import make_model

pytestmark = [pytest.mark.prove, pytest.mark.dist]
SCRIPT = Path(__file__).with_name("publishing_run.py")
STEPS = range(5, 45, 5)
TRAINERS = [
    pytest.param(name, marks=pytest.mark.skipif(find_spec(needs) is None, reason=f"{needs} is not installed"))
    for name, needs in (
        ("plain", "torch"),
        ("trainer", "accelerate"),
        ("accelerate", "accelerate"),
        ("lightning", "lightning"),
        ("torch_checkpointing", "torch_checkpointing"),
    )
]


def train(trainer: str, model: Path, home: Path, *options: str) -> str:
    """Run a trainer to its end; return what it printed."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
    ]
    command += ["--rdzv-endpoint", "localhost:0", str(SCRIPT), trainer, str(model), str(home), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def published(home: Path, model: Path) -> set[int]:
    """Compare each published model with what consolidate makes of the copy of its checkpoint; return the steps."""
    found = {int(path.name.removeprefix("step-")) for path in (home / "published").glob("step-*")}
    (home / "expected").mkdir()
    for step in found:
        expected = home / f"expected/step-{step}"
        shardkit.consolidate(home / f"copies/step-{step}", expected, base=str(model), ask_class=False)
        assert contents(home / f"published/step-{step}") == contents(expected)
    assert not [path for path in (home / "published").iterdir() if path.name.startswith(".step")]
    return found


def steps_in(what: str, text: str) -> set[int]:
    """Return the steps of which a watch said something."""
    return set(map(int, re.findall(rf"{what} \S*?(\d+)(?:\.ckpt)?:", text)))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_model(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trainer_publishes_its_own_checkpoints(trainer: str, model: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    options = ["--base", str(model), "--ask-class", "off"]
    said = train(trainer, model, home, *options)
    log = (home / "published/watch.log").read_text()
    found = published(home, model)
    assert max(found) == max(STEPS), "the last one is always published"
    assert len(found) > 1, log
    assert "publishing ended" not in said


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_whole_checkpoint_is_published_or_named_beside_a_trainer(
    trainer: str, model: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    watching = [sys.executable, "-m", "shardkit", "watch", str(home / "run"), str(home / "published")]
    watching += ["--base", str(model), "--ask-class", "off", "--settle", "1"]
    with subprocess.Popen(watching, stderr=subprocess.PIPE, text=True) as watcher:
        try:
            train(trainer, model, home)
        except BaseException:
            watcher.kill()
            raise
        deadline = time.monotonic() + 120
        while not (home / f"published/step-{max(STEPS)}").exists():
            assert watcher.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        watcher.send_signal(signal.SIGTERM)
        said = watcher.communicate()[1]
    assert watcher.returncode == 143
    done = subprocess.run([*watching, "--once"], capture_output=True, text=True, check=True)
    found = published(home, model)
    passed = steps_in("passed over", said + done.stderr)
    assert steps_in("waiting for", said) <= found | passed, said
    record = json.loads((home / "published" / RECORD).read_text())
    assert {model["step"] for model in record["models"]} == found


@pytest.mark.parametrize("options", [["--base", "gone/model"], ["--no-such-option"]])
def test_what_goes_wrong_is_logged_and_does_not_end_the_training(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    from tests.operations.consolidate.checkpoints import save, training_state, weights

    save(training_state(weights()), Path("run/step-5"))
    publisher = shardkit.Publisher("run", "published", *options)
    publisher.saved()
    failure = publisher.finish()
    assert failure is not None
    typed = " ".join(options)
    assert failure.endswith(f"run by hand: shardkit watch run published --once --no-progress {typed}")
    assert failure in caplog.text
    assert "error: " in Path("published/watch.log").read_text()


ENVIRONMENT = """
import json, os, time
for _ in range(500):  # it is lowered once the process runs
    if (priority := os.getpriority(os.PRIO_PROCESS, 0)) == 19:
        break
    time.sleep(0.02)
print(json.dumps({**os.environ, "priority": priority}))
"""


def test_the_process_has_none_of_the_jobs_settings_and_other_ranks_start_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    publisher = shardkit.Publisher("run", "published")
    publisher.command = [sys.executable, "-c", ENVIRONMENT]
    for rank, expected in (("3", False), ("0", True)):
        monkeypatch.setenv("RANK", rank)
        publisher.saved()
        assert publisher.finish() is None
        assert Path("published/watch.log").exists() == expected
    for line in Path("published/watch.log").read_text().splitlines():
        found = json.loads(line)
        assert (found["CUDA_VISIBLE_DEVICES"], found["priority"]) == ("", 19)
        assert not [
            name for name in found if name.startswith(("RANK", "WORLD", "LOCAL_", "MASTER_", "TORCHELASTIC"))
        ]


def test_what_a_caller_gets_wrong_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "")
    published = shardkit.Publisher(tmp_path / "run", tmp_path / "out", "--keep", 1)  # type: ignore[arg-type]
    refused = shardkit.Publisher("a\0b", tmp_path / "out")
    for publisher in (published, refused):
        publisher.saved()
    assert published.finish() is None
    assert str(refused.finish()).startswith("publishing did not start: embedded null byte")
    assert "publishing did not start: embedded null byte; run by hand: shardkit watch" in caplog.text
    callback = shardkit.TrainerPublisher(run="run", output_directory="out")
    assert isinstance(callback, sys.modules["transformers"].TrainerCallback)


def test_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves during a publication are published by the next one; `finish` begins one more."""
    monkeypatch.chdir(tmp_path)
    Path("go").touch()
    wait = "import pathlib, time\nwhile pathlib.Path('go').exists(): time.sleep(0.02)\nprint('ran')"
    publisher = pickle.loads(
        pickle.dumps(shardkit.Publisher("run", "published"))
    )  # as mp.spawn hands it over
    publisher.command = [sys.executable, "-c", wait]
    for _ in range(3):
        publisher.saved()
    Path("go").unlink()
    assert publisher.finish() is None
    assert Path("published/watch.log").read_text() == "ran\n" * 2
