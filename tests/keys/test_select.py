"""What a person asks of names."""

import pytest

from shardkit.errors import SourceError, UsageError
from shardkit.keys.select import Globs, Naming, parse_rules, select_model
from tests.keys.key_sets import MODELS, entries, optimizer

LLAMA = MODELS["llama"]
STORED = [f"app.model.{name}" for name in LLAMA]
PATHS = {name: ("app", "model", name.removeprefix("app.model.")) for name in STORED}


def test_root() -> None:
    selection = select_model(entries(STORED), naming=Naming(root="app.model.model.layers"))
    assert next(iter(selection.names.values())) == "0.input_layernorm.weight"
    assert {part.path for part in selection.skipped} == {
        "app.model.lm_head",
        "app.model.model.embed_tokens",
        "app.model.model.norm",
    }


def test_root_in_the_spelling_of_a_wrapper() -> None:
    tensors = entries([f"net._orig_mod.{name}" for name in LLAMA])
    assert set(select_model(tensors, naming=Naming(root="net._orig_mod.")).names.values()) == set(LLAMA)


@pytest.mark.parametrize("root", ["app.modle", "app.model.lm_head.weight"])
def test_unknown_root(root: str) -> None:
    with pytest.raises(UsageError, match="not in the checkpoint") as caught:
        select_model(entries(STORED), naming=Naming(root=root))
    assert "closest name: app.model" in str(caught.value)


def test_nothing_is_guessed_below_a_root() -> None:
    names = [f"layers.{layer}.module.weight" for layer in range(2)]
    tensors = entries([f"net.{name}" for name in names])
    paths = {f"net.{name}": ("net", name) for name in names}
    assert set(select_model(tensors, (), paths).names.values()) == {"layers.0.weight", "layers.1.weight"}
    assert set(select_model(tensors, naming=Naming(root="net")).names.values()) == set(names)


def test_strip_prefix_replaces_what_would_be_guessed() -> None:
    tensors = {**entries(STORED), **optimizer("optim", LLAMA)}
    selection = select_model(tensors, naming=Naming(strip_prefix=("app",)))
    assert set(selection.names.values()) == {f"model.{name}" for name in LLAMA}
    assert selection.stripped == (("app.", 12),)
    with pytest.raises(UsageError, match="no name begins with") as caught:
        select_model(tensors, naming=Naming(strip_prefix=("app.modell.",)))
    assert "closest name: app.model" in str(caught.value)


def test_add_prefix_and_renames_in_order() -> None:
    selection = select_model(
        entries(STORED),
        (),
        PATHS,
        naming=Naming(
            add_prefix="language",
            rename=("^language\\.(?=model)=", "layers\\.(\\d+)=block.\\1", "^language\\.lm_head=head"),
        ),
    )
    assert "model.block.2.mlp.up_proj.weight" in selection.names.values()
    assert "head.weight" in selection.names.values()
    assert selection.notes == ()


def test_a_rename_that_changes_nothing_is_said() -> None:
    selection = select_model(entries(STORED), (), PATHS, naming=Naming(rename=("nothing=x",)))
    assert [note.split(" matches")[0] for note in selection.notes] == ["--rename 'nothing=x'"]


def test_every_bad_option_is_listed() -> None:
    with pytest.raises(UsageError) as caught:
        parse_rules(Naming(rename=("no equals", "(=x", "(a)=\\2", "a=b", "=x"), strip_prefix=(".",)))
    assert len(caught.value.problems) == 5


def test_include_and_exclude() -> None:
    names = list(select_model(entries(STORED), (), PATHS).names.values())
    globs = Globs(("*.layers.1.*", "lm_head.*"), ("*layernorm*",))
    globs.check(names)
    assert list(filter(globs.selects, names)) == [
        "lm_head.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
    ]
    with pytest.raises(UsageError, match="leave none of 12"):
        Globs((), ("*",)).check(names)
    with pytest.raises(UsageError, match="2 globs of --include and --exclude match no name") as caught:
        Globs(("app.model.lm_head.*", "lm_head.*"), ("*.absent",)).check(names)
    assert caught.value.problems[0].startswith("app.model.lm_head.*")
    Globs((), ()).check([])


def test_what_is_left_out_counts_as_excluded() -> None:
    selection = select_model(entries(STORED))
    some = selection.only({"app.model.lm_head.weight"})
    assert list(some.names) == ["app.model.lm_head.weight"]
    assert [(part.kind, part.num_tensors) for part in some.skipped] == [("excluded", 11)]


def test_a_name_is_never_given_twice() -> None:
    stored = [*STORED, "app.model._orig_mod.lm_head.weight"]
    with pytest.raises(SourceError) as found:
        select_model(
            entries(stored), (), {name: ("app", "model", name.removeprefix("app.model.")) for name in stored}
        )
    assert found.value.problems == (
        "lm_head.weight: from app.model.lm_head.weight and app.model._orig_mod.lm_head.weight",
    )
    with pytest.raises(UsageError) as asked:
        select_model(entries(STORED), naming=Naming(rename=("layers\\.\\d=layers.0",)))
    assert len(asked.value.problems) == 3
    with pytest.raises(UsageError, match="1 name would be given") as asked:
        select_model(entries(STORED), naming=Naming(rename=("^.*$=x",)))
    assert asked.value.problems[0].endswith(f" and {len(STORED) - 3} more")  # one line, however many
    with pytest.raises(UsageError, match="empty"):
        select_model(entries(STORED), naming=Naming(rename=(".*=",)))


def test_names_are_escaped() -> None:
    with pytest.raises(SourceError) as caught:
        select_model(entries(["a\x1b[31m.b", "a\x1b[31m._orig_mod.b"]))
    assert "\x1b" not in str(caught.value)
