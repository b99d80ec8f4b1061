"""Hub directories: which files are the weights, whether index and files agree, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import struct
import threading
from math import prod
from pathlib import Path

import pytest

import shardkit
from shardkit.core.regions import Region
from shardkit.errors import ShardkitError, SourceError
from shardkit.formats.hub import directory
from shardkit.formats.hub.directory import open_model
from shardkit.formats.hub.files import WeightFiles, missing_parts, select_weights, variant_of, which_part

SIZES = {"U8": 1, "BF16": 2, "F32": 4}


def write_file(path, metadata=None, **tensors):
    """Write a safetensors file; tensors are (dtype, shape), and every byte is the tensor's number."""
    header, data = {}, b""
    for number, (fqn, (dtype, shape)) in enumerate(tensors.items()):
        piece = bytes([number]) * (prod(shape) * SIZES[dtype])
        offsets = [len(data), len(data) + len(piece)]
        header[fqn] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        data += piece
    text = json.dumps(header | ({"__metadata__": metadata} if metadata else {})).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_index(path, weight_map, **metadata):
    path.write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))


A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
ONE = {"a": ("U8", (2, 3))}


@pytest.fixture
def sharded(tmp_path):
    """A model in two files; the index has another order than the files."""
    model = tmp_path / "tiny"
    write_file(model / A, a=("U8", (2, 3)), b=("BF16", (4,)))
    write_file(model / B, c=("F32", ()))
    write_index(model / INDEX, {"c": B, "b": A, "a": A}, total_size=18)
    return model


def refused(model, **options):
    with pytest.raises(SourceError) as caught:
        open_model(str(model), **options)
    assert "\x1b" not in str(caught.value)
    return str(caught.value)


def test_single_file(tmp_path):
    write_file(tmp_path / "m" / "model.safetensors", {"format": "pt"}, b=("U8", (2,)), a=("F32", (2, 2)))
    (tmp_path / "m" / "config.json").write_text('{"model_type": "llama", "x": Infinity}')
    model = open_model(str(tmp_path / "m"))
    catalog = model.catalog
    assert (model.label, model.config["model_type"], catalog.format) == ("m", "llama", "safetensors")
    assert list(catalog.tensors) == ["b", "a"]
    (chunk,) = catalog.tensors["a"].chunk_ids
    assert catalog.chunks.region(chunk) == Region((0, 0), (2, 2))
    (file,) = catalog.files
    start, nbytes = catalog.chunks.start[chunk], catalog.chunks.nbytes[chunk]
    assert Path(file.path).read_bytes()[start : start + nbytes] == b"\x01" * 16
    assert catalog.notes == ()


def test_index_gives_the_order(sharded):
    model = open_model(str(sharded))
    assert list(model.catalog.tensors) == ["c", "b", "a"]
    assert [file.name for file in model.catalog.files] == [B, A]
    assert model.catalog.notes == ()
    assert model.catalog.nbytes == 18
    assert model.config is None


def test_identity_is_of_the_bytes_and_not_of_the_place(sharded, tmp_path):
    identity = open_model(str(sharded)).identity
    assert [file.name for file in identity.files] == [B, A]
    assert str(tmp_path) not in repr(identity)
    shutil.copytree(sharded, tmp_path / "copy")
    assert open_model(str(tmp_path / "copy")).identity == identity
    write_file(tmp_path / "copy" / B, c=("U8", (4,)))
    assert open_model(str(tmp_path / "copy")).identity != identity


def test_paths_to_files(sharded, tmp_path, monkeypatch):
    assert list(open_model(str(sharded / INDEX)).catalog.tensors) == ["c", "b", "a"]
    one = open_model(str(sharded / A))
    assert (list(one.catalog.tensors), one.label) == (["a", "b"], A.removesuffix(".safetensors"))
    assert "is part 1 of 2 of a model" in one.catalog.notes[0]
    os.symlink(sharded / B, tmp_path / "link.safetensors")
    assert list(open_model(str(tmp_path / "link.safetensors")).catalog.tensors) == ["c"]
    monkeypatch.chdir(sharded)
    write_file(sharded / "model.safetensors", **ONE)
    assert open_model("model.safetensors").label == "tiny"
    (tmp_path / "notes.txt").touch()
    assert "give a directory" in refused(tmp_path / "notes.txt")
    os.mkfifo(tmp_path / "model.safetensors")
    assert "found a pipe" in refused(tmp_path / "model.safetensors")
    assert "no such file or directory" in refused(tmp_path / "absent")


# name: (file names, variant, what is chosen or what the error says)
CHOICES = {
    "single": (["model.safetensors"], None, "model.safetensors"),
    "index": ([INDEX, A, B], None, INDEX),
    "safetensors before bin": (["pytorch_model.bin", "model.safetensors"], None, "model.safetensors"),
    "nothing by accident": (
        ["model.safetensors", "adapter_model.safetensors", "consolidated.safetensors", "optimizer.pt",
         "training_args.bin", "rng_state_0.pth", "model.fp16.safetensors", "x.gguf"],
        None, "model.safetensors",
    ),
    "variant": (["model.safetensors", "model.fp16.safetensors"], "fp16", "model.fp16.safetensors"),
    "variant index": (["model.fp16.safetensors.index.json"], "fp16", "model.fp16.safetensors.index.json"),
    "transformers' index": (["model.safetensors.index.fp16.json"], "fp16", "model.safetensors.index.fp16.json"),
    "only variant": (["model.fp16.safetensors"], None, "model.fp16.safetensors"),
    "only variant, sharded": (
        ["model.safetensors.index.fp16.json", "model.fp16-00001-of-00002.safetensors"],
        None, "model.safetensors.index.fp16.json",
    ),
    "bin before variant": (["pytorch_model.bin", "model.fp16.safetensors"], None, "pytorch_model.bin"),
    "bin": (["pytorch_model.bin", "training_args.bin"], None, "pytorch_model.bin"),
    "bin index": (["pytorch_model.bin.index.json"], None, "pytorch_model.bin.index.json"),
    "bin variant": (["pytorch_model.fp16.bin"], None, "pytorch_model.fp16.bin"),
    "other index": (["diffusion.safetensors.index.json"], None, "diffusion.safetensors.index.json"),
    "two variants": (["model.fp16.safetensors", "model.ema.safetensors"], None, "2 files could be"),
    "two forms of one": (["model.fp16.safetensors", "model.safetensors.index.fp16.json"], "fp16", "2 files could"),
    "two indexes": (["x.safetensors.index.json", "y.safetensors.index.json"], None, "2 files could be"),
    "unknown variant": (["model.safetensors", "model.fp16.safetensors"], "fp61", "closest name: fp16"),
    "no variant": (["model.safetensors"], "fp16", "has no weights of variant 'fp16'"),
    "adapter": (["adapter_config.json", "adapter_model.safetensors"], None, "MODEL m merged`"),
    "consolidated": (["consolidated.safetensors", "consolidated.safetensors.index.json"], None, "found consolidated.safetensors.index.json"),
    "optimizer": (["optimizer.pt", "training_args.bin", "rng_state_0.pth"], None, "found optimizer.pt"),
    "file of torch.save": (["optimizer.pt", "model.pt"], None, "found model.pt"),
    "tensorflow": (["tf_model.h5", "config.json"], None, "this is a model of TensorFlow, which is not read"),
    "orbax": (["_CHECKPOINT_METADATA", "d"], None, "this is an Orbax checkpoint (JAX), which is not read"),
    "diffusers": (["diffusion_pytorch_model.bin", "diffusion_pytorch_model.safetensors"], None, "diffusion_pytorch_model.safetensors"),
    "diffusers' index": (["diffusion_pytorch_model.safetensors.index.json"], None, "diffusion_pytorch_model.safetensors.index.json"),
    "diffusers' bin": (["diffusion_pytorch_model.bin"], None, "diffusion_pytorch_model.bin"),
    "diffusers' variant": (
        ["diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.safetensors"],
        "fp16", "diffusion_pytorch_model.fp16.safetensors",
    ),
    "only variant of diffusers, sharded": (
        ["diffusion_pytorch_model.safetensors.index.fp16.json", "diffusion_pytorch_model.fp16-00001-of-00002.safetensors"],
        None, "diffusion_pytorch_model.safetensors.index.fp16.json",
    ),
    "two libraries": (["model.safetensors", "diffusion_pytorch_model.safetensors"], None, "2 files could be the weights"),
    "no index of diffusers": (["diffusion_pytorch_model-00001-of-00002.safetensors"], None, "model.safetensors.index.json too"),
    "pipeline": (["model_index.json", "unet"], None, "found unet"),
    "no index": ([A, B], None, "download model.safetensors.index.json too"),
    "no bin index": (["pytorch_model-00001-of-00002.bin"], None, "pytorch_model.bin.index.json too"),
    "gguf": (["x-q4.gguf", "config.json"], None, "this is a model in GGUF format, which is not read"),
    "dcp": ([".metadata", "__0_0.distcp"], None, "sharded checkpoint"),
    "dcp beside weights": ([".metadata", "model.safetensors"], None, "sharded checkpoint"),
    "verl": (["model_world_size_2_rank_0.pt", "fsdp_config.json", "huggingface"], None, "sharded checkpoint"),
    "folders": (["latest", "global_step5"], None, "found global_step5"),
    "nothing": ([], None, "m is an empty directory"),
    "escaped": (["\x1b[2J.txt"], None, "found \\x1b[2J.txt"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHOICES)
def test_choice(case):
    names, variant, expected = CHOICES[case]
    if expected in names:
        chosen = select_weights(names, "m", variant=variant)
        assert (chosen.index or chosen.single) == expected
        assert bool(chosen.notes) == case.startswith(("only variant", "bin variant"))
        return
    with pytest.raises(SourceError) as caught:
        select_weights(names, "m", variant=variant)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("name", "stem", "variant"),
    [
        ("model.safetensors", "model", None),
        ("pytorch_model.bin.index.json", "model", None),
        ("model.fp16.safetensors", "model", "fp16"),
        ("diffusion_pytorch_model.bin", "diffusion_pytorch_model", None),
        ("diffusion_pytorch_model.non_ema.safetensors", "diffusion_pytorch_model", "non_ema"),
        ("diffusion_pytorch_model.safetensors.index.fp16.json", "diffusion_pytorch_model", None),
        ("transformer.safetensors.index.json", "transformer", None),
        ("transformer-00001-of-00002.safetensors", "transformer", None),
        ("model.fp16-00001-of-00002.safetensors", "model", "fp16"),
        ("diffusion_pytorch_model-00001-of-00002.fp16.safetensors", "diffusion_pytorch_model", "fp16"),
    ],
)
def test_what_a_name_begins_with(name, stem, variant):
    assert (WeightFiles(kind="safetensors", index=None, single=name).stem, variant_of(name)) == (
        stem,
        variant,
    )


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model-00001-of-00009.safetensors", "part 1 of 9"),
        ("model-00001-of-000163.safetensors", "part 1 of 163"),
        ("pytorch_model-00002-of-00002.bin", "part 2 of 2"),
        ("model.fp16-00001-of-00002.safetensors", "part 1 of 2"),
        ("diffusion_pytorch_model-00001-of-00002.fp16.safetensors", "part 1 of 2"),
        ("pytorch_model_00003-of-00004.bin", "part 3 of 4"),
        ("MODEL-00002-OF-00003.safetensors", "part 2 of 3"),
        ("consolidated-1-of-3.safetensors", "part 1 of 3"),
        ("shard-00002-model-00001-of-00001.safetensors", "what one rank holds"),
        ("model-00001-of-00001.safetensors", None),
        ("model.safetensors", None),
        ("best-of-3.safetensors", None),
    ],
)
def test_the_part_that_a_file_is(name, part):
    assert which_part(name) == part


def test_stray_file_beside_an_index(sharded):
    write_file(sharded / "model.safetensors", **ONE)
    text = refused(sharded)
    assert "model.safetensors lies beside model.safetensors.index.json" in text
    write_index(sharded / INDEX, {"a": "model.safetensors"})
    assert list(open_model(str(sharded)).catalog.tensors) == ["a"]


def test_an_index_that_was_cut_short(sharded):
    """Its files are numbered as two, and both are there, so what the other holds would be lost."""
    write_index(sharded / INDEX, {"a": A, "b": A})
    text = refused(sharded)
    assert f"{INDEX} does not list 1 file of the set that it lists" in text
    assert B in text
    assert list(open_model(str(sharded / INDEX)).catalog.tensors) == ["a", "b"]
    (sharded / B).rename(sharded / "model-00002-of-00003.safetensors")
    assert list(open_model(str(sharded)).catalog.tensors) == ["a", "b"]


def test_subdirectories_in_an_index(tmp_path):
    write_file(tmp_path / "parts" / "x.safetensors", **ONE)
    write_index(tmp_path / INDEX, {"a": "parts/x.safetensors"})
    assert open_model(str(tmp_path)).catalog.files[0].name == "parts/x.safetensors"


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/hostname", "a\\b", "a\0b", "a/../b", "a//b", "./a", "", ".", "x\x1b", "\ud800", 7, None],
)
def test_unsafe_file_name(sharded, name):
    write_index(sharded / INDEX, {"a": name, "b": name, "c": B})
    text = refused(sharded)
    assert f"{INDEX}: 2 of 3 entries do not name a file" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "not valid JSON"),
        ("[]", "expected an object"),
        ("{}", "weight_map: expected an object"),
        ('{"weight_map": {}}', "found no entry"),
        ('{"weight_map": []}', "found list"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "  a\n"),
        ('{"weight_map": {"a": "x"}, "metadata": NaN}', "NaN"),
        ("{" * 100_000, "not valid JSON"),
    ],
)
def test_bad_index(sharded, text, expected):
    (sharded / INDEX).write_text(text)
    message = refused(sharded)
    assert message.startswith(f"{INDEX}: ")
    assert expected in message


def test_index_size_cap(sharded):
    with open(sharded / INDEX, "wb") as file:
        file.truncate((256 << 20) + 1)
    assert "expected at most 268435456 bytes" in refused(sharded)


@pytest.mark.parametrize(
    ("spoil", "how_many", "what"),
    [
        (Path.unlink, "2 of 2 files", ""),
        (lambda path: os.truncate(path, path.stat().st_size - 1), "2 of 2 weight files are refused", ": truncated"),
    ],
    ids=["missing", "cut"],
)  # fmt: skip
def test_files_that_cannot_be_read_are_all_listed(sharded, spoil, how_many, what):
    for name in (A, B):
        spoil(sharded / name)
    text = refused(sharded)
    assert all(said in text for said in (how_many, f"{A}{what}", f"{B}{what}"))


def test_numbered_files_that_are_missing():
    file = "model-{:05d}-of-00004.safetensors"
    assert missing_parts([file.format(1), file.format(4)]) == (file.format(2), file.format(3))
    assert missing_parts([f"model-{at}-of-12.bin" for at in range(1, 12)]) == ("model-12-of-12.bin",)
    assert missing_parts([f"model-{at:05d}-of-00003.safetensors" for at in range(3)]) == ()
    assert missing_parts([f"model-{at:05d}-of-000163.safetensors" for at in range(1, 164)]) == ()
    assert missing_parts(["model.safetensors", "x-7-of-3.bin", "model-00001-of-00001.safetensors"]) == ()


def test_index_and_files_disagree(sharded):
    write_file(sharded / A, a=("U8", (1,)), b=("U8", (1,)), stray=("U8", (1,)), both=("U8", (1,)))
    write_file(sharded / B, c=("U8", (1,)), both=("U8", (1,)))
    write_index(sharded / INDEX, {"c": B, "a": B, "b": A, "layers.0.gone": A, "both": A})
    text = refused(sharded)
    assert f"{INDEX} and its files disagree in 4 places" in text
    assert f"a: listed in {B}, found in {A}" in text
    assert f"layers.0.gone: listed in {A}, which lacks it" in text
    assert f"stray: in {A}, not in the index" in text
    assert f"both: in 2 files: {A}, {B}" in text or f"both: in 2 files: {B}, {A}" in text


def test_total_size_is_only_a_note(sharded):
    write_index(sharded / INDEX, {"c": B, "b": A, "a": A}, total_size=99)
    (note,) = open_model(str(sharded)).catalog.notes
    assert "total_size is 99 bytes, the tensors take 18" in note


def test_links(sharded, tmp_path):
    outside = tmp_path / "outside"
    (sharded / A).rename(outside)
    (sharded / A).symlink_to(outside)
    model = open_model(str(sharded))
    assert len(model.catalog.tensors) == 3
    note = f"1 weight file is a link to a file outside of {sharded}: {A} -> {outside}"
    assert model.catalog.notes == (note,)
    (linked,) = (file for file in model.catalog.files if file.name == A)
    assert linked.stamp is not None
    assert linked.stamp.inode == outside.stat().st_ino
    outside.rename(sharded / "inside")
    (sharded / A).unlink()
    (sharded / A).symlink_to("inside")
    assert len(open_model(str(sharded)).catalog.tensors) == 3
    (sharded / A).unlink()
    (sharded / "loop").symlink_to(A)
    (sharded / A).symlink_to("loop")
    assert A in refused(sharded)


@pytest.mark.parametrize("what", ["pipe", "directory", "device", "nothing", "text"])
def test_a_link_of_weights_leads_to_a_weight_file(sharded, tmp_path, what):
    outside = tmp_path / "outside"
    make = {
        "pipe": lambda: os.mkfifo(outside),
        "directory": outside.mkdir,
        "device": lambda: outside.symlink_to("/dev/zero"),
        "nothing": lambda: None,
        "text": lambda: outside.write_text("password"),
    }
    make[what]()
    (sharded / A).unlink()
    (sharded / A).symlink_to(outside)
    text = refused(sharded)
    assert A in text
    assert "password" not in text


@pytest.mark.parametrize("name", [INDEX, "config.json"])
def test_other_links_are_followed_on_request(sharded, tmp_path, name):
    (sharded / "config.json").write_text('{"a": 1}')
    (sharded / name).rename(tmp_path / "outside")
    (sharded / name).symlink_to(tmp_path / "outside")
    text = refused(sharded)
    assert "leaves its directory" in text
    assert "--follow-links" in text
    assert shardkit.inspect(sharded, follow_links=True).num_tensors == 3
    assert "leaves its directory" in refused(sharded)  # what one call allows the next one does not
    (tmp_path / "outside").unlink()
    os.mkfifo(tmp_path / "outside")
    with pytest.raises(SourceError, match="found a pipe"):
        shardkit.inspect(sharded, follow_links=True)


def test_cache_of_the_hub(sharded, tmp_path):
    repo = tmp_path / "models--org--My-Model"
    snapshot = repo / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for number, name in enumerate((A, B, INDEX)):
        (sharded / name).rename(repo / "blobs" / f"{number}")
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    (repo / "blobs" / "config").write_text('{"a": 1}')
    (snapshot / "config.json").symlink_to("../../blobs/config")
    model = open_model(str(snapshot))
    assert (model.label, model.config, len(model.catalog.tensors)) == ("My-Model", {"a": 1}, 3)
    (snapshot / A).unlink()
    (snapshot / A).symlink_to("../../refs")
    assert f"{A}: no such file" in refused(snapshot)
    (snapshot / INDEX).unlink()
    (snapshot / INDEX).symlink_to("../../refs")
    assert "leaves its directory" in refused(snapshot)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"a": "\xff"}'])
def test_bad_config(sharded, text):
    (sharded / "config.json").write_bytes(text.encode("latin-1"))
    assert refused(sharded).startswith("config.json: ")


def test_variant_of_a_directory(sharded):
    write_file(sharded / "model.fp16.safetensors", **ONE)
    assert list(open_model(str(sharded), variant="fp16").catalog.tensors) == ["a"]
    assert len(open_model(str(sharded)).catalog.tensors) == 3


def test_names_are_escaped(tmp_path):
    write_file(tmp_path / "model.safetensors", **{"a\x1b[2J\n": ("U8", (1,))})
    assert list(open_model(str(tmp_path)).catalog.tensors) == ["a\x1b[2J\n"]
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-1])
    assert "a\\x1b[2J\\x0a" in refused(tmp_path).replace("\\n", "\\x0a")


def test_every_error_is_ours(tmp_path):
    for source in ("", "a\0b", "a\0b/c", "\ud800", "x" * 5000):
        with pytest.raises(ShardkitError):
            open_model(source)


def test_headers_are_read_together(sharded, monkeypatch):
    """One by one, each is a wait on storage over a network."""
    both, read = threading.Barrier(2, timeout=600), directory.read_header

    def wait(*given):
        both.wait()
        return read(*given)

    monkeypatch.setattr(directory, "read_header", wait)
    assert list(open_model(str(sharded)).catalog.tensors) == ["c", "b", "a"]
