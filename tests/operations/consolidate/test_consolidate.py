"""consolidate through its Python API: names, values, dtypes, ties, bases, destinations."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file

import shardkit
from shardkit import formats
from shardkit.errors import IntegrityError, Interrupted, LayoutError, ResourceError, SourceError, UsageError
from shardkit.files import manifest
from shardkit.files.digest import crc32
from shardkit.operations.consolidate import default_output
from shardkit.operations.consolidate.assets import _WITHOUT_CACHE, set_dtype
from shardkit.operations.consolidate.run import check_file
from shardkit.transfer.execute import FileDigest
from tests.bits import raw
from tests.contents import contents, json_of
from tests.operations.consolidate.checkpoints import (
    CONFIG,
    EMBED,
    HEAD,
    assert_bit_equal,
    hub,
    load,
    save,
    tiny_moe,
    training_state,
    weights,
)
from tests.operations.stops import InterruptAfter, failing

pytestmark = pytest.mark.usefixtures("fast_trace")

MakeHub = Callable[..., Path]
TIED = {**CONFIG, "tie_word_embeddings": True}
T5 = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A checkpoint with model, optimizer and trainer state."""
    return save(training_state(weights()), tmp_path / "step-7")


class TestWhatComesOut:
    """Names and values."""

    def test_a_training_state_becomes_the_model(self, trained: Path, tmp_path: Path) -> None:
        result = shardkit.consolidate(trained)
        assert result.output == str(tmp_path / "step-7-hf")
        assert os.listdir(result.output) == ["model.safetensors"]
        assert_bit_equal(load(result.output), weights())
        assert (result.root, result.num_tensors, result.num_files) == ("model", 21, 1)
        assert "optimizer" in {part.what for part in result.skipped}
        assert result.read_bytes == sum(value.nbytes for value in weights().values())
        assert sorted(p.name for p in tmp_path.iterdir()) == ["step-7", "step-7-hf"]

    def test_transformers_loads_it(self, trained: Path, tmp_path: Path) -> None:
        base = hub(tmp_path / "base", weights(torch.bfloat16))
        result = shardkit.consolidate(trained, base=str(base), max_shard_size=2000)
        assert result.num_files > 2
        model = transformers.AutoModelForCausalLM.from_pretrained(result.output)
        assert_bit_equal(model.state_dict(), weights())

    @pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
    def test_unchanged_weights_give_the_bases_own_files(self, trained: Path, tmp_path: Path) -> None:
        """Experts become single ones again, and every file of the base is there, byte for byte."""
        model = tiny_moe()
        model.save_pretrained(tmp_path / "base", max_shard_size="5KB")
        dcp.save(model.state_dict(), checkpoint_id=tmp_path / "step-1")
        shardkit.consolidate(tmp_path / "step-1", tmp_path / "out", base=tmp_path / "base")
        names = sorted(path.name for path in (tmp_path / "base").glob("model*"))
        assert len(names) > 3
        assert sorted(path.name for path in (tmp_path / "out").glob("model*")) == names
        for name in names:
            found, base = ((tmp_path / place / name).read_bytes() for place in ("out", "base"))
            assert found.rstrip() == base.rstrip()
        options = {"base": tmp_path / "base", "max_shard_size": "1GB"}
        assert shardkit.consolidate(tmp_path / "step-1", tmp_path / "two", **options).num_files == 1

    def test_optimizer_bytes_are_not_read(self, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """They are several times the model's, and often damaged without anybody noticing."""
        seen: list[str] = []
        opened = formats.open

        def spy(path: Any, **given: Any) -> Any:
            checkpoint = opened(path, **given)
            if not isinstance(path, str):  # it is open already
                return checkpoint
            select = checkpoint.select
            object.__setattr__(checkpoint, "select", lambda names: seen.extend(names) or select(names))
            return checkpoint

        monkeypatch.setattr(formats, "open", spy)
        shardkit.consolidate(trained)
        assert len(seen) == 21
        assert not [name for name in seen if "exp_avg" in name]

    @pytest.mark.parametrize("world_size", [1, 3, 8])
    def test_hub_to_shards_and_back(self, world_size: int, make_hub: MakeHub, tmp_path: Path) -> None:
        torch.manual_seed(0)
        tensors = {
            "layers.0.weight": torch.randn(70, 33),
            "layers.10.weight": torch.randn(3, 4, 5, dtype=torch.float64),
            "layers.2.weight": torch.randn(7).half(),
            "fp8": torch.randint(0, 255, (6, 5), dtype=torch.uint8).view(torch.float8_e4m3fn),
            "phase": torch.randn(5, 2, dtype=torch.complex64),
            "ids": torch.arange(9).reshape(3, 3),
            "mask": torch.tensor([True, False, True]),
            "scalar": torch.tensor(2.5),
            "empty": torch.zeros(0, 4),
            "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        }
        shardkit.preshard(make_hub(tensors), tmp_path / "sharded", world_size=world_size, wrap="none")
        result = shardkit.consolidate(str(tmp_path / "sharded"), root="", max_shard_size="4KB")
        assert_bit_equal(load(result.output), tensors)
        index = json_of(result.output, "model.safetensors.index.json")
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
        assert index["metadata"]["total_parameters"] == sum(t.numel() for t in tensors.values())
        assert index["weight_map"].keys() == tensors.keys()

    def test_layers_are_in_their_order(self, tmp_path: Path) -> None:
        state = {f"layers.{n}.weight": torch.full((2,), float(n)) for n in range(12)}
        result = shardkit.consolidate(save(state, tmp_path / "c"), root="", max_shard_size=8)
        files = [load_file(Path(result.output, name)) for name in result.file_names]
        assert [next(iter(file)) for file in files] == list(state)

    def test_equal_input_gives_equal_bytes(self, tmp_path: Path) -> None:
        found = []
        for name in ("one", "another"):
            source = save(training_state(weights()), tmp_path / name / "last.ckpt")
            jobs = len(found) + 1
            out = tmp_path / name / "out"
            shardkit.consolidate(source, out, max_shard_size=4000, manifest=True, jobs=jobs)
            found.append(contents(out))
        assert found[0] == found[1]
        assert str(tmp_path).encode() not in b"".join(found[0].values())

    def test_names_can_be_changed(self, tmp_path: Path) -> None:
        source = save({"net.a.weight": torch.ones(2), "net.b.weight": torch.zeros(3)}, tmp_path / "c")
        result = shardkit.consolidate(
            source, strip_prefix=["net"], add_prefix="model", rename=[r"\.a\.=.c."], exclude=["*b*"]
        )
        assert list(load(result.output)) == ["model.c.weight"]

    def test_a_weight_that_is_no_tensor_is_lost(self, tmp_path: Path) -> None:
        state = {"layers.0.w": torch.ones(2), "layers.1.w": 5, "layers.1._extra_state": 6, "step": 7}
        with pytest.raises(SourceError, match="1 entries are not tensors") as raised:
            shardkit.consolidate(save(state, tmp_path / "c"))
        assert raised.value.problems == ("layers.1.w",)
        del state["layers.1.w"]
        result = shardkit.consolidate(save(state, tmp_path / "d"), root="")
        assert list(load(result.output)) == ["layers.0.w"]

    @pytest.mark.parametrize("size", [0, 20])
    def test_states_of_modules_that_the_base_lacks(self, tmp_path: Path, size: int) -> None:
        """TransformerEngine's, of fp8: tensors without elements where nothing is in fp8."""
        name = "model.layers.0.self_attn.q_proj._extra_state"
        source = save({**weights(), name: torch.zeros(size, dtype=torch.uint8)}, tmp_path / "c")
        base = hub(tmp_path / "base", weights(), CONFIG)
        result = shardkit.consolidate(source, tmp_path / "out", base=base)
        assert load(result.output).keys() == weights().keys()
        assert f"not written, they are states of modules, no weights: {name}" in result.notes
        result = shardkit.consolidate(source, tmp_path / "all", base=base, allow_unexpected=True)
        assert load(result.output)[name].shape == (size,)

    def test_states_of_the_root_and_states_that_are_dicts(self, tmp_path: Path) -> None:
        """torch names a state after its module: `_extra_state` of the root; a dict's entries follow."""
        states = {"_extra_state": torch.ones(3), "model.norm._extra_state": {"scale": torch.ones(2)}}
        source = save({**weights(), **states}, tmp_path / "c")
        base = hub(tmp_path / "base", weights(), CONFIG)
        result = shardkit.consolidate(source, tmp_path / "out", base=base)
        assert load(result.output).keys() == weights().keys()
        names = "_extra_state, model.norm._extra_state.scale"
        assert f"not written, they are states of modules, no weights: {names}" in result.notes

    def test_nothing_that_safetensors_can_hold(self, tmp_path: Path) -> None:
        state = {"a.weight": torch.ones(2, dtype=torch.complex128), "b.weight": torch.ones(2)}
        with pytest.raises(SourceError, match=r"(?s)1 of the tensors.*a\.weight: complex128"):
            shardkit.consolidate(save(state, tmp_path / "c"))
        assert [p.name for p in tmp_path.iterdir()] == ["c"]

    def test_a_dry_run_tells_the_same_and_writes_nothing(self, trained: Path, tmp_path: Path) -> None:
        dry = shardkit.consolidate(trained, dry_run=True, max_shard_size=4000)
        assert [p.name for p in tmp_path.iterdir()] == ["step-7"]
        wet = shardkit.consolidate(trained, max_shard_size=4000)
        assert dry.file_bytes == tuple(os.path.getsize(os.path.join(wet.output, n)) for n in wet.file_names)
        assert (dry.checked_bytes, wet.checked_bytes > 0) == (0, True)
        changing = dict.fromkeys(
            ("dry_run", "elapsed_s", "moving_s", "free_bytes", "checked_bytes", "names"), 0
        )
        assert dry.to_json() | changing == wet.to_json() | changing


def norms_in_fp32(others: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return {name: value if "norm" in name else value.to(others) for name, value in weights().items()}


class TestDtypes:
    """--dtype, and what is never narrowed."""

    @pytest.mark.parametrize(
        ("dtype", "expected"),
        [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32), ("keep", torch.float64)],
    )
    def test_floating_tensors_only(self, dtype: str, expected: torch.dtype, tmp_path: Path) -> None:
        torch.manual_seed(0)
        state = {
            "a.weight": torch.randn(300, 50, dtype=torch.float64),
            "ids": torch.arange(5),
            "fp8": torch.ones(4).to(torch.float8_e4m3fn),
        }
        source = save(state, tmp_path / "c")
        result = shardkit.consolidate(source, root="", dtype=dtype, max_memory="2MiB", jobs=1)
        assert_bit_equal(load(result.output), {**state, "a.weight": state["a.weight"].to(expected)})
        assert (dtype == "keep") is not any("fp8" in note for note in result.notes)

    def test_a_tensor_larger_than_the_memory_is_converted(self, tmp_path: Path) -> None:
        state = {"w.weight": torch.randn(1100, 1000)}
        source = save(state, tmp_path / "c")
        result = shardkit.consolidate(source, root="", dtype="bf16", max_memory="2MiB", jobs=1)
        assert result.peak_memory_bytes <= 2 << 20 < state["w.weight"].nbytes
        assert_bit_equal(load(result.output), {"w.weight": state["w.weight"].bfloat16()})

    def test_as_the_base_stores_each(self, trained: Path, tmp_path: Path) -> None:
        mixed = norms_in_fp32()
        base = hub(tmp_path / "base", mixed)
        result = shardkit.consolidate(trained, base=str(base), dtype="base")
        assert_bit_equal(load(result.output), mixed)
        assert json_of(result.output) == CONFIG  # the base's own, whatever it says

    def test_what_the_base_keeps_in_fp32_stays(self, trained: Path, tmp_path: Path) -> None:
        base = hub(tmp_path / "base", norms_in_fp32())
        result = shardkit.consolidate(trained, base=str(base), dtype="fp16")
        assert_bit_equal(load(result.output), norms_in_fp32(torch.float16))
        assert any(note.startswith("kept in fp32") and "5 tensors" in note for note in result.notes)

    def test_what_the_model_class_keeps_in_fp32_stays(self, tmp_path: Path) -> None:
        sizes = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 11}
        base = hub(tmp_path / "base", None, {**T5, **sizes})
        state = {
            "encoder.block.0.layer.1.DenseReluDense.wo.weight": torch.randn(8, 16),
            "encoder.block.0.layer.1.DenseReluDense.wi.weight": torch.randn(16, 8),
        }
        result = shardkit.consolidate(save(state, tmp_path / "c"), root="", dtype="fp16", base=str(base))
        assert [str(t.dtype) for t in load(result.output).values()].count("torch.float32") == 1
        assert load(result.output)[next(iter(state))].dtype is torch.float32

    @pytest.mark.parametrize(("has_base", "why"), [(False, "there is no base"), (True, "its class")])
    def test_it_says_where_nobody_knows(
        self, has_base: bool, why: str, trained: Path, tmp_path: Path
    ) -> None:
        base = hub(tmp_path / "base", config={**CONFIG, "model_type": "nobodys"})
        result = shardkit.consolidate(trained, base=str(base) if has_base else None, dtype="bf16")
        said = f"it is not known which tensors the model keeps in fp32, as {why}"
        assert any(said in note for note in result.notes)

    def test_base_dtypes_need_a_base(self, trained: Path) -> None:
        with pytest.raises(UsageError, match="dtype base"):
            shardkit.consolidate(trained, dtype="base")


class TestTies:
    """One copy of equal ones, both of those that differ."""

    def consolidated(
        self, tmp_path: Path, state: dict[str, torch.Tensor], config: dict[str, Any] | None, **options: Any
    ) -> shardkit.ConsolidateResult:
        source = save({"model": state}, tmp_path / "c")
        base = None if config is None else str(hub(tmp_path / "base", None, config))
        return shardkit.consolidate(source, base=base, **options)

    def test_equal_copies_are_written_once(self, tmp_path: Path) -> None:
        result = self.consolidated(tmp_path, weights(tied=True), TIED)
        assert result.ties == ((EMBED, HEAD),)
        expected = weights(tied=True)
        del expected[HEAD]
        assert_bit_equal(load(result.output), expected)

    @pytest.mark.parametrize("config", [None, CONFIG, {k: v for k, v in CONFIG.items() if "tie" not in k}])
    def test_equal_copies_are_both_written_where_nothing_ties_them(
        self, config: dict[str, Any] | None, tmp_path: Path
    ) -> None:
        """Without a word in it, a Llama's config does not tie: `from_pretrained` would initialise the output."""
        result = self.consolidated(tmp_path, weights(tied=True), config)
        assert_bit_equal(load(result.output), weights(tied=True))
        assert result.ties == ()

    def test_copies_that_differ_are_both_written_and_the_config_says_so(self, tmp_path: Path) -> None:
        deep = {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}
        config = {**TIED, "text_config": {"tie_word_embeddings": True}, "thinker_config": deep}
        result = self.consolidated(tmp_path, weights(), config)
        assert_bit_equal(load(result.output), weights())
        assert result.untied == ((EMBED, HEAD),)
        assert HEAD in result.warnings[0]
        written = json_of(result.output)
        assert written["tie_word_embeddings"] is written["text_config"]["tie_word_embeddings"] is False
        assert written["thinker_config"]["text_config"]["tie_word_embeddings"] is False

    def test_a_config_that_says_nothing_says_it_now(self, tmp_path: Path) -> None:
        """transformers' default may be either."""
        result = self.consolidated(tmp_path, weights(), {k: v for k, v in CONFIG.items() if "tie" not in k})
        assert json_of(result.output)["tie_word_embeddings"] is False
        assert not result.warnings

    def test_a_base_that_stores_one_copy_decides(self, tmp_path: Path) -> None:
        stored = weights(tied=True)
        del stored[HEAD]
        base = hub(tmp_path / "base", stored, TIED)
        same = shardkit.consolidate(save(weights(tied=True), tmp_path / "same"), base=str(base))
        assert_bit_equal(load(same.output), stored)
        other = shardkit.consolidate(save(weights(), tmp_path / "other"), base=str(base))
        assert_bit_equal(load(other.output), weights())
        assert other.untied == ((EMBED, HEAD),)

    def test_a_base_that_stores_both_decides(self, tmp_path: Path) -> None:
        base = hub(tmp_path / "base", weights(tied=True), TIED)
        result = shardkit.consolidate(save(weights(tied=True), tmp_path / "c"), base=str(base))
        assert_bit_equal(load(result.output), weights(tied=True))

    def test_a_shared_embedding_of_encoder_and_decoder(self, tmp_path: Path) -> None:
        shared = torch.randn(9, 4)
        names = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", HEAD)
        source = save({n: shared.clone() for n in names}, tmp_path / "c")
        base = hub(tmp_path / "base", None, T5)
        assert list(load(shardkit.consolidate(source, base=base, root="").output)) == ["shared.weight"]
        assert load(shardkit.consolidate(source, tmp_path / "alone", root="").output).keys() == set(names)

    def test_a_t5_with_an_output_of_its_own_keeps_its_scales(self, tmp_path: Path) -> None:
        """There tie_word_embeddings: false says how outputs are scaled; values that differ are loaded as they are."""
        state = {"shared.weight": torch.randn(9, 4), HEAD: torch.randn(9, 4)}
        base = hub(tmp_path / "base", None, T5)
        result = shardkit.consolidate(save(state, tmp_path / "c"), base=base, root="")
        assert_bit_equal(load(result.output), state)
        assert "tie_word_embeddings" not in json_of(result.output)

    def test_copies_cut_in_different_ways_are_compared(self, tmp_path: Path) -> None:
        """By their values, however many chunks each has."""
        from shardkit.core.catalog import Catalog, SourceFile
        from shardkit.core.dtypes import BY_NAME
        from shardkit.core.regions import Region
        from shardkit.transfer.sources import same_bytes

        values = torch.arange(24, dtype=torch.int32).reshape(4, 6)
        catalog, content = Catalog(format="x", directory=str(tmp_path)), b""
        cuts: dict[str, list[tuple[slice, slice]]] = {
            "rows": [(slice(2, 4), slice(0, 6)), (slice(0, 2), slice(0, 6))],
            "columns": [(slice(0, 4), slice(0, 1)), (slice(0, 4), slice(1, 6))],
            "whole": [(slice(0, 4), slice(0, 6))],
            "other": [(slice(0, 4), slice(0, 6))],
        }
        for name, boxes in cuts.items():
            chunks = []
            for box in boxes:
                data = (values + (name == "other")).numpy()[box].tobytes()
                region = Region(tuple(s.start for s in box), tuple(s.stop - s.start for s in box))
                chunks.append((0, len(content), len(data), region))
                content += data
            catalog.add_tensor(name, BY_NAME["int32"], (4, 6), iter(chunks))
        (tmp_path / "x").write_bytes(content)
        catalog.files.append(SourceFile(name="x", path=str(tmp_path / "x"), size=len(content)))
        for name in ("rows", "columns", "whole"):
            assert same_bytes(catalog, name, "whole")
            assert same_bytes(catalog, "columns", name)
            assert not same_bytes(catalog, name, "other")


class TestBase:
    """The model that it was trained from."""

    def test_its_files_are_copied(self, trained: Path, tmp_path: Path) -> None:
        taken = "chat_template.jinja entity_vocab.json modeling_own.py normalizer.json spm_char.model"
        taken += " tiktoken.model tokenizer.json additional_chat_templates/tools.jinja"
        base = hub(tmp_path / "base", weights())
        (base / "additional_chat_templates").mkdir()
        for name in (*taken.split(), "README.md", "trainer_state.json", "optimizer.pt", "training_args.bin"):
            (base / name).write_text("{}")
        result = shardkit.consolidate(trained, base=str(base))
        assert set(contents(Path(result.output))) == {"config.json", "model.safetensors", *taken.split()}
        assert set(result.assets) == {"config.json", *taken.split()}
        assert result.model_class == "LlamaForCausalLM"
        assert "no model card: README.md of" in "".join(result.notes)

    def test_a_processors_other_tokenizers_are_copied(self, trained: Path, tmp_path: Path) -> None:
        """transformers reads the main tokenizer in place of one that is missing, and says so in a log alone."""
        made = []
        for name, letters in (("main", "abcd"), ("protein", "dcba")):
            vocab = "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters])
            place = hub(tmp_path / name, config=None, vocab__txt=vocab)
            made.append(transformers.BertTokenizer.from_pretrained(place))
        base = hub(tmp_path / "base", weights())
        processor = transformers.EvollaProcessor(protein_tokenizer=made[1], tokenizer=made[0])
        processor.save_pretrained(base)
        truth = transformers.AutoProcessor.from_pretrained(base)
        assert truth.tokenizer.get_vocab() != truth.protein_tokenizer.get_vocab()
        sharded = shardkit.preshard(base, tmp_path / "sharded", world_size=2)
        for source, options in ((trained, {"base": str(base)}), (sharded.output, {})):
            result = shardkit.consolidate(source, tmp_path / "out", overwrite=True, **options)
            loaded = transformers.AutoProcessor.from_pretrained(result.output)
            for one in ("tokenizer", "protein_tokenizer"):
                assert getattr(loaded, one).get_vocab() == getattr(truth, one).get_vocab()

    def test_the_card_names_a_base_of_the_hub(self, trained: Path, tmp_path: Path) -> None:
        """A base's own card says what it was trained on and how well it does, which is not true of the output."""
        base = tmp_path / "models--org--small--8b" / "snapshots" / "0123abcd"
        hub(base, weights(), README__md="# small", LICENSE="MIT")
        result = shardkit.consolidate(trained, base=str(base))
        card = (Path(result.output) / "README.md").read_text()
        assert card == "---\nbase_model: org/small--8b  # https://huggingface.co/org/small--8b\n---\n"
        assert (Path(result.output) / "LICENSE").read_text() == "MIT"
        assert "README.md names the base, org/small--8b, and no more" in result.notes
        assert shardkit.consolidate(trained, base=str(base), overwrite=True).notes == result.notes

    def test_a_card_that_this_run_does_not_write_is_moved_away_first(
        self, trained: Path, tmp_path: Path
    ) -> None:
        bases = []
        for name in ("org--one", "org--two"):
            base = tmp_path / f"models--{name}" / "snapshots" / "0123abcd"
            bases.append(str(hub(base, weights(), README__md=f"# {name}")))
        out = Path(shardkit.consolidate(trained, tmp_path / "out", base=bases[0]).output)
        shardkit.consolidate(trained, out, base=bases[0], overwrite=True)
        with pytest.raises(UsageError) as caught:
            shardkit.consolidate(trained, out, base=bases[1], overwrite=True)
        assert caught.value.problems == ("README.md: it is not what this run writes there",)
        assert f"`mv {out}/README.md {out}-README.md`" in str(caught.value.hint)
        (out / "README.md").rename(f"{out}-README.md")
        shardkit.consolidate(trained, out, base=bases[1], overwrite=True)
        assert (out / "README.md").read_text().startswith("---\nbase_model: org/two  #")

    def test_a_card_in_the_checkpoint_stays(self, tmp_path: Path) -> None:
        checkpoint = save({"model": weights()}, tmp_path / "c")
        hub(checkpoint / "huggingface", None, README__md="mine")
        result = shardkit.consolidate(checkpoint)
        assert (Path(result.output) / "README.md").read_text() == "mine"

    def test_dtypes_of_the_base_leave_its_config_alone(self, tmp_path: Path) -> None:
        """Most bytes of these are fp32, and `from_pretrained` would have made all of it so."""
        wide = {EMBED: torch.randn(37, 64), HEAD: torch.randn(37, 64)}
        model = {**{name: w.bfloat16() for name, w in weights().items()}, **wide}
        assert 2 * sum(w.nbytes for w in wide.values()) > sum(w.nbytes for w in model.values())
        config = {**CONFIG, "dtype": "bfloat16", "audio_config": {"dtype": "bfloat16"}}
        base = hub(tmp_path / "base", model, config)
        checkpoint = save({"model": model}, tmp_path / "c")
        for options in ({}, {"dtype": "base"}, {"dtype": "bf16"}):  # the last keeps what the base has in fp32
            result = shardkit.consolidate(checkpoint, base=str(base), overwrite=True, **options)
            assert json_of(result.output) == config
            assert not any("halves" in note for note in result.notes)
        result = shardkit.consolidate(checkpoint, base=str(base), overwrite=True, dtype="fp32")
        assert json_of(result.output)["dtype"] == "float32"

    def test_a_dtype_that_no_tensor_has_is_not_kept(self, trained: Path, tmp_path: Path) -> None:
        """The base's own tensors are fp32 too, and its config is wrong: loaded by it, all weights would be rounded."""
        base = hub(tmp_path / "base", weights(), {**CONFIG, "dtype": "bfloat16"})
        result = shardkit.consolidate(trained, base=str(base))
        assert json_of(result.output)["dtype"] == "float32"

    def test_the_config_is_the_bases_but_for_the_dtype(self, trained: Path, tmp_path: Path) -> None:
        config = {**CONFIG, "dtype": "float16", "text_config": {"torch_dtype": "float16"}, "use_cache": False}
        result = shardkit.consolidate(trained, base=str(hub(tmp_path / "b", None, config)), dtype="bf16")
        expected = {**config, "dtype": "bfloat16", "text_config": {"torch_dtype": "bfloat16"}}
        assert json_of(result.output) == expected

    def test_parts_of_parts_have_the_dtype_too(self, trained: Path, tmp_path: Path) -> None:
        """Qwen3-Omni's thinker has parts itself. What Quark says of numbers is another thing."""
        config = transformers.AutoConfig.for_model("qwen3_omni_moe", dtype="bfloat16").to_dict()
        for part in (thinker := config["thinker_config"], thinker["text_config"]):
            part["dtype"] = "bfloat16"
        base = hub(tmp_path / "b", None, config)
        result = shardkit.consolidate(trained, base=str(base), dtype="fp16")
        loaded = transformers.AutoConfig.from_pretrained(result.output)
        assert loaded.thinker_config.text_config.dtype == loaded.thinker_config.dtype == torch.float16
        quark = {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int8"}}}
        thinker["text_config"]["quantization_config"] = quark
        set_dtype(config, "float16")
        written = config["thinker_config"]["text_config"]
        assert (written["dtype"], written["quantization_config"]) == ("float16", quark)

    @pytest.mark.parametrize(
        ("version", "key"), [("4.40.0", "torch_dtype"), ("4.56.0", "dtype"), (None, "dtype")]
    )
    def test_a_config_without_a_dtype(
        self, version: str | None, key: str, trained: Path, tmp_path: Path
    ) -> None:
        config = {k: v for k, v in CONFIG.items() if k not in ("dtype", "transformers_version")}
        config |= {"transformers_version": version} if version else {}
        result = shardkit.consolidate(trained, base=str(hub(tmp_path / "b", None, config)))
        assert json_of(result.output)[key] == "float32"

    def test_what_does_not_fit_is_listed(self, trained: Path, tmp_path: Path) -> None:
        theirs = weights()
        theirs["model.layers.2.extra"] = torch.ones(1)
        theirs[EMBED] = torch.ones(38, 16)
        del theirs["model.norm.weight"]
        base = str(hub(tmp_path / "base", theirs))
        with pytest.raises(LayoutError) as raised:
            shardkit.consolidate(trained, base=base)
        problems = raised.value.problems
        assert any(line.startswith("missing: model.layers.2.extra") for line in problems)
        assert any(line.startswith("unexpected: model.norm.weight") for line in problems)
        assert f"shape: {EMBED}: [37, 16], in the base [38, 16]" in problems
        with pytest.raises(LayoutError, match=r"1 difference\n"):
            shardkit.consolidate(trained, base=base, allow_missing=True, allow_unexpected=True)
        assert not (tmp_path / "step-7-hf").exists()

    def test_what_is_allowed_is_said(self, trained: Path, tmp_path: Path) -> None:
        theirs = weights()
        theirs["model.layers.2.extra"] = torch.ones(1)
        del theirs["model.norm.weight"]
        base = str(hub(tmp_path / "base", theirs))
        result = shardkit.consolidate(trained, base=base, allow_missing=True, allow_unexpected=True)
        assert_bit_equal(load(result.output), weights())
        named = [note for note in result.notes if re.search(r"model\.(norm\.weight|layers\.2\.extra)", note)]
        assert len(named) == 2

    def test_what_the_checkpoint_carries_is_found(
        self, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A trainer's own copy: what it changed for the run is changed back."""
        changed = {**CONFIG, "use_cache": False, "_name_or_path": "/scratch/somebody/model"}
        inside = hub(tmp_path / "huggingface", None, changed, tokenizer__json="{}")
        (inside / "generation_config.json").write_text('{"use_cache": false, "top_k": 3}')
        with_assets(monkeypatch, str(inside))
        result = shardkit.consolidate(trained)
        assert (result.base, result.warnings) == ("huggingface", ())
        assert json_of(result.output) == CONFIG
        assert json_of(result.output, "generation_config.json") == {"use_cache": True, "top_k": 3}
        assert any("use_cache" in note for note in result.notes)

    def test_a_hub_model_keeps_its_config(self, tmp_path: Path) -> None:
        """Split anew; of what transformers' Trainer saved, the run's changes go."""
        source = hub(tmp_path / "model", weights(), {**CONFIG, "use_cache": False})
        result = shardkit.consolidate(source, max_shard_size=4000)
        assert result.format == "hub"
        assert json_of(result.output) == {**CONFIG, "use_cache": False}
        assert_bit_equal(load(result.output), weights())
        (source / "trainer_state.json").write_text("{}")
        again = shardkit.consolidate(source, str(tmp_path / "again"), single_file=True)
        assert json_of(again.output) == CONFIG

    def test_a_type_without_a_cache_stays_one(self, trained: Path, tmp_path: Path) -> None:
        """Their configs say so by themselves; training had nothing to switch off."""
        classes = {name: transformers.CONFIG_MAPPING[name] for name in transformers.CONFIG_MAPPING.keys()}
        without = {name for name, kind in classes.items() if getattr(kind, "use_cache", None) is False}
        assert without == _WITHOUT_CACHE & classes.keys()
        config = transformers.MptConfig(d_model=16, n_heads=2, n_layers=2, architectures=["MptForCausalLM"])
        config.save_pretrained(trained)
        made = shardkit.consolidate(trained, tmp_path / "out", ask_class=False)
        assert json_of(made.output)["use_cache"] is False

    def test_weights_that_lie_with_what_was_found_bind_nobody(
        self, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with_assets(monkeypatch, str(hub(tmp_path / "huggingface", {"other.weight": torch.ones(1)})))
        result = shardkit.consolidate(trained)
        assert_bit_equal(load(result.output), weights())
        assert any("other.weight" in warning for warning in result.warnings)

    def test_without_one_it_says_what_is_lacking(self, trained: Path) -> None:
        assert any("--base" in warning for warning in shardkit.consolidate(trained).warnings)

    @pytest.mark.parametrize("base", ["no/such/base/here", "step-7", "step-7/.metadata"])
    def test_what_is_no_base(self, base: str, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(trained.parent)
        with pytest.raises(SourceError, match="base"):
            shardkit.consolidate(trained, base=base)

    def test_a_misspelt_directory_is_thought_of(self, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A name without a slash may be a repo's, and is a directory's far more often."""

        def fetch(repo_id: str, *_: Any, **__: Any) -> str:
            raise ResourceError(f"{repo_id}: cannot be downloaded", hint="check the network")

        monkeypatch.setattr("shardkit.formats.hub.base.fetch_files", fetch)
        with pytest.raises(ResourceError) as caught:
            shardkit.consolidate(trained, base="qwen3-bse")
        assert caught.value.message.startswith("qwen3-bse: not a local path; on the Hub: cannot be")
        assert caught.value.hint == "check the path, or name a model on the Hub as organisation/name"
        with pytest.raises(ResourceError) as caught:
            shardkit.consolidate(trained, base="org/qwen3")
        assert caught.value.hint == "check the network"

    def test_links_that_leave_it_are_not_followed(self, trained: Path, tmp_path: Path) -> None:
        base = hub(tmp_path / "base", weights())
        (tmp_path / "secret").write_text("s")
        (base / "tokenizer.json").symlink_to(tmp_path / "secret")
        result = shardkit.consolidate(trained, base=str(base))
        assert not (Path(result.output) / "tokenizer.json").exists()
        assert any("tokenizer.json" in note and "--follow-links" in note for note in result.notes)
        (base / "config.json").rename(tmp_path / "config")
        (base / "config.json").symlink_to(tmp_path / "config")
        with pytest.raises(SourceError, match=r"config\.json: a symbolic link that leaves") as caught:
            shardkit.consolidate(trained, tmp_path / "out", base=str(base))
        assert "--follow-links" in (caught.value.hint or "")
        result = shardkit.consolidate(trained, tmp_path / "out", base=str(base), follow_links=True)
        copied = tmp_path / "out" / "tokenizer.json"
        assert (copied.read_text(), copied.is_symlink()) == ("s", False)
        assert (tmp_path / "out" / "config.json").is_file()
        assert not any("links that leave" in note for note in result.notes)

    def test_a_link_to_nothing_is_named(self, trained: Path, tmp_path: Path) -> None:
        """As a pruned cache leaves them; without a word the output would have no tokenizer."""
        base = hub(tmp_path / "base", weights())
        (base / "tokenizer.json").symlink_to("gone")
        (base / "tokenizer.model").symlink_to("../gone")
        for result in (
            shardkit.consolidate(trained, base=str(base)),
            shardkit.preshard(str(base), tmp_path / "out", world_size=2, wrap="none"),
        ):
            (note,) = [note for note in result.notes if "not copied" in note]
            assert note.count("tokenizer.json") == note.count("tokenizer.model") == 1

    def test_pointers_of_git_lfs_are_not_copied(self, trained: Path, tmp_path: Path) -> None:
        """Without a word the output would have a tokenizer that nothing can read."""
        base = hub(tmp_path / "base", weights())
        pointers = ["tokenizer.json", "tokenizer.model"]
        for name in pointers:
            (base / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
        for dry_run in (True, False):
            for write in (
                lambda n: shardkit.consolidate(trained, tmp_path / "out", base=str(base), dry_run=n),
                lambda n: shardkit.consolidate(trained, tmp_path / "out", tokenizer=base, dry_run=n),
                lambda n: shardkit.preshard(base, tmp_path / "out", world_size=2, wrap="none", dry_run=n),
                lambda n: shardkit.reshard(base, tmp_path / "out", world_size=2, dry_run=n),
            ):
                with pytest.raises(SourceError, match="pointers of Git LFS") as caught:
                    write(dry_run)
                assert list(caught.value.problems) == pointers
                assert "`git lfs pull`" in str(caught.value.hint)
        assert not (tmp_path / "out").exists()

    def test_weights_in_a_shared_store_are_read_and_named(self, tmp_path: Path) -> None:
        """Everywhere; what is written holds their bytes, not links."""
        model = hub(tmp_path / "model", weights())
        (model / "model.safetensors").rename(tmp_path / "blob")
        (model / "model.safetensors").symlink_to(tmp_path / "blob")
        link = f"model.safetensors -> {tmp_path / 'blob'}"
        note = f"1 weight file is a link to a file outside of {model}: {link}"
        made = shardkit.consolidate(model, tmp_path / "out")
        split = shardkit.preshard(model, tmp_path / "split", world_size=2, wrap="none")
        for result in (made, split, shardkit.inspect(model), shardkit.verify(model, full=True)):
            assert note in result.notes, result
        assert not (tmp_path / "out" / "model.safetensors").is_symlink()
        for other in ("out", "split"):
            found = shardkit.diff(model, tmp_path / other)
            assert found.is_equal
            assert note in found.notes
        (tmp_path / "blob").unlink()
        with pytest.raises(SourceError, match=r"model\.safetensors: no such file"):
            shardkit.consolidate(model, tmp_path / "again")


def with_assets(monkeypatch: pytest.MonkeyPatch, *directories: str) -> None:
    """Let the checkpoint carry directories of its own, as some trainers' do."""
    opened = formats.open

    def open_with(path: Any, **given: Any) -> Any:
        checkpoint = opened(path, **given)
        object.__setattr__(checkpoint.contents, "assets", directories)
        return checkpoint

    monkeypatch.setattr(formats, "open", open_with)


class TestChecks:
    """Before and after the bytes move."""

    @pytest.mark.parametrize("damage", ["header", "short"])
    def test_what_was_written_is_read_back(
        self, damage: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def check_damaged(job: Any, directory: str, digest: FileDigest) -> None:
            path = Path(directory) / digest.name
            content = path.read_bytes()
            path.write_bytes(content[:-1] if damage == "short" else content.replace(b'"F32"', b'"I32"', 1))
            check_file(job, directory, digest)

        monkeypatch.setattr("shardkit.operations.consolidate.check_file", check_damaged)
        with pytest.raises(IntegrityError, match="the file on disk differs from what was written"):
            shardkit.consolidate(trained, max_shard_size=4000)
        assert [p.name for p in tmp_path.iterdir()] == ["step-7"]

    def test_a_manifest_is_there_on_request(self, trained: Path) -> None:
        result = shardkit.consolidate(trained, manifest=True)
        content = manifest.load(manifest.read_bytes(result.output), manifest.NAME)
        assert content is not None
        assert content["tensors"].keys() == weights().keys()
        assert [file["name"] for file in content["files"]] == ["model.safetensors"]
        for name, value in weights().items():
            assert content["tensors"][name]["crc32"] == crc32(raw(value))
        assert shardkit.inspect(result.output).kind == "hub"


class TestDestination:
    """What may be written, and where."""

    @pytest.mark.parametrize(
        ("checkpoint", "output"),
        [
            ("/run/last.ckpt", "last-hf"),
            ("/run/last.ckpt/", "last-hf"),
            ("/run/epoch=0-step=2.ckpt", "epoch=0-step=2-hf"),
            ("/run/step-1000", "step-1000-hf"),
            ("/run/pytorch_model.bin", "pytorch_model-hf"),
            ("s3://bucket/run/step-1000", "step-1000-hf"),
        ],
    )
    def test_default(self, checkpoint: str, output: str) -> None:
        assert default_output(checkpoint) == output

    def test_a_checkpoint_around_the_working_directory_gets_a_sibling(
        self, trained: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(trained)
        assert default_output(str(trained)) == f"{trained}-hf"

    def test_a_runs_newest_checkpoint_is_taken(self, tmp_path: Path) -> None:
        for step in (9, 10):
            save({"model": {"w.weight": torch.full((2,), float(step))}}, tmp_path / "run" / f"step-{step}")
        result = shardkit.consolidate(tmp_path / "run")
        assert result.output == str(tmp_path / "step-10-hf")
        assert result.step == 10
        (value,) = load(result.output).values()
        assert value[0] == 10

    def test_the_same_step_of_another_run_gets_a_longer_name(self, tmp_path: Path) -> None:
        for run in ("one", "two"):
            save({"model": {"w.weight": torch.ones(2)}}, tmp_path / run / "step-9")
        assert shardkit.consolidate(tmp_path / "one").output == str(tmp_path / "step-9-hf")
        save({"model": {"w.weight": torch.zeros(2)}}, tmp_path / "two" / "step-9")
        with pytest.raises(UsageError, match="exists") as caught:
            shardkit.consolidate(tmp_path / "two")
        assert caught.value.hint is not None
        assert "two-step-9-hf" in caught.value.hint

    def test_an_earlier_output_is_replaced_whole(self, trained: Path) -> None:
        old = shardkit.consolidate(trained, max_shard_size=4000)
        with pytest.raises(UsageError, match="exists"):
            shardkit.consolidate(trained)
        shardkit.consolidate(trained, overwrite=True)
        assert os.listdir(old.output) == ["model.safetensors"]

    @pytest.mark.parametrize("other", ["checkpoint-500", "optimizer.pt", ".git", "thesis.tex"])
    def test_nothing_else_is_ever_replaced(self, other: str, trained: Path, tmp_path: Path) -> None:
        """A run's directory has the final model beside all its checkpoints."""
        out = hub(tmp_path / "out", weights())
        (out / other).mkdir()
        with pytest.raises(UsageError, match=f"(?s)not replaced|{re.escape(other)}"):
            shardkit.consolidate(trained, str(out), overwrite=True)
        assert (out / other).exists()

    def test_a_directory_without_weights_is_not_replaced(self, trained: Path, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "README.md").touch()
        with pytest.raises(UsageError, match="holds no weights"):
            shardkit.consolidate(trained, str(tmp_path / "out"), overwrite=True)

    @pytest.mark.parametrize("place", ["", "inside", ".."])
    def test_the_checkpoint_is_never_written(self, place: str, trained: Path) -> None:
        with pytest.raises(UsageError):
            shardkit.consolidate(trained, os.path.join(trained, place), overwrite=True)

    def test_too_little_space_is_known_before_the_first_byte(
        self, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usage = type("usage", (), {"free": 100})
        monkeypatch.setattr("shardkit.files.storage.disk_usage", lambda path: usage)
        with pytest.raises(ResourceError, match="No space left"):
            shardkit.consolidate(trained)
        assert [p.name for p in tmp_path.iterdir()] == ["step-7"]

    def test_a_disk_that_fills_up_half_way_leaves_nothing(
        self, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("shardkit.files.storage.pwrite", failing(errno.ENOSPC))
        with pytest.raises(ResourceError, match=r"model\.safetensors.*No space left"):
            shardkit.consolidate(trained)
        assert [p.name for p in tmp_path.iterdir()] == ["step-7"]

    def test_the_umask_decides_the_modes(self, trained: Path, tmp_path: Path) -> None:
        base = hub(tmp_path / "base", weights(), tokenizer__json="{}")
        (base / "tokenizer.json").chmod(0o600)
        old = os.umask(0o027)
        try:
            result = shardkit.consolidate(trained, base=str(base), max_shard_size=4000, manifest=True)
        finally:
            os.umask(old)
        assert {p.stat().st_mode & 0o777 for p in Path(result.output).iterdir()} == {0o640}

    def test_an_interrupted_call_is_resumed_by_the_next_one(self, trained: Path, tmp_path: Path) -> None:
        with pytest.raises(Interrupted):
            shardkit.consolidate(trained, max_shard_size=2000, jobs=1, progress=InterruptAfter(15))
        assert not (tmp_path / "step-7-hf").exists()
        result = shardkit.consolidate(trained, max_shard_size=2000)
        assert result.resumed_files > 0
        assert_bit_equal(load(result.output), weights())
        assert not list(tmp_path.glob(".*"))

    @pytest.mark.parametrize(
        "options",
        [
            {"dtype": "int8"},
            {"digest": "md5"},
            {"max_shard_size": 0},
            {"max_shard_size": "5 apples"},
            {"jobs": 0},
            {"private": True},
            {"branch": "x"},
            {"base_revision": "main"},
            {"allow_missing": True},
            {"rename": ["no equals sign"]},
            {"push_to_hub": "not a repo"},
        ],
    )
    def test_options_that_cannot_be_carried_out(
        self, options: dict[str, Any], trained: Path, tmp_path: Path
    ) -> None:
        with pytest.raises(UsageError):
            shardkit.consolidate(trained, **options)
        assert [p.name for p in tmp_path.iterdir()] == ["step-7"]


def test_a_hub_model_without_tensors_is_one_still(tmp_path: Path) -> None:
    shardkit.consolidate(hub(tmp_path / "empty", {}, None), tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors") == {}
