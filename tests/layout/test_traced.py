import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import shardkit
from shardkit.core.catalog import Catalog, TensorEntry
from shardkit.core.dtypes import BY_NAME, CASTS
from shardkit.core.mesh import Mesh, parse_mesh
from shardkit.errors import LayoutError, PolicyError, ResourceError
from shardkit.files import manifest
from shardkit.keys.names import natural
from shardkit.layout import traced
from shardkit.layout.choice.choose import fit_trace, make_layout
from shardkit.layout.layout import CannotBuildError, Layout
from shardkit.layout.traced import Trace, trace_model
from tests.formats.reading import chunk_list_of

MESH = parse_mesh(None, 4)
ModelDir = Callable[..., str]

pytestmark = pytest.mark.usefixtures("fast_trace")


def trace(directory: str, mesh: Mesh, wrap: str, **options: Any) -> Layout:
    return trace_model(directory, mesh, wrap, **options).layout


def source_of(
    layout: Layout, *, without: tuple[str, ...] = (), more: Mapping[str, tuple[int, ...]] = {}
) -> dict[str, TensorEntry]:
    """The tensors of a file that holds what the layout stores."""
    shapes = {name: tensor.shape for name, tensor in layout.tensors.items() if name not in without}
    return {
        fqn: TensorEntry(fqn=fqn, dtype=BY_NAME["float32"], shape=shape, first_chunk=0, num_chunks=1)
        for fqn, shape in {**shapes, **more}.items()
    }


@dataclass(frozen=True)
class FakeModel:
    catalog: Catalog
    config: dict[str, object] | None
    directory: str


def fake_model(directory: str, tensors: dict[str, TensorEntry]) -> FakeModel:
    config = json.loads((Path(directory) / "config.json").read_text())
    return FakeModel(Catalog(format="safetensors", directory=directory, tensors=tensors), config, directory)


def placements(layout: Layout, fqn: str) -> list[str]:
    return [str(placement) for placement in layout.tensors[fqn].placements]


def test_llama_units_are_its_decoder_layers_in_order(model_dir: ModelDir) -> None:
    found = trace_model(model_dir("llama"), parse_mesh("dp_replicate=2,dp_shard=2", None), "auto")
    layout = found.layout
    assert found.model_class == "LlamaForCausalLM"
    assert layout.origin == "traced"
    assert [unit.path for unit in layout.units] == ["", *(f"model.layers.{n}" for n in range(11))]
    assert {unit.class_name for unit in layout.units[1:]} == {"LlamaDecoderLayer"}
    assert {fqn for fqn, tensor in layout.tensors.items() if tensor.unit == 0} == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    }
    assert {tuple(map(str, tensor.placements)) for tensor in layout.tensors.values()} == {("R", "S(0)")}
    assert layout.tensors["model.embed_tokens.weight"].shape == (101, 24)
    assert layout.tensors["model.layers.10.mlp.up_proj.weight"].unit == 11
    assert layout.ties == ()
    assert layout.keep_fp32 == frozenset()
    assert "model.rotary_emb.inv_freq" in found.absent_buffers


def random_weights(directory: str, *, copy: Path, **changes: object) -> tuple[Path, Path]:
    """A model with random weights twice: with its config, and with one that names no architecture, so is declared."""
    config = json.loads((Path(directory) / "config.json").read_text())
    copy.mkdir()
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(directory)
    ).save_pretrained(directory)
    (Path(directory) / "config.json").write_text(json.dumps(config))
    shutil.copy(Path(directory) / "model.safetensors", copy)
    (copy / "config.json").write_text(json.dumps({**config, **changes}))
    return Path(directory), copy


@pytest.mark.parametrize(("name", "container"), [("llama", "model.layers"), ("llama-tied", "model.layers")])
def test_traced_and_declared_layouts_are_the_same_files(
    name: str, container: str, model_dir: ModelDir, tmp_path: Path
) -> None:
    source, unnamed = random_weights(model_dir(name), copy=tmp_path / "unnamed", model_type=None)
    written: list[tuple[str, dict[str, bytes]]] = []
    for at, (directory, wrap) in enumerate(
        [(source, "auto"), (source, "none"), (source, f"{container}.*.mlp"), (unnamed, "auto")]
    ):
        out = tmp_path / f"out-{at}"
        origin = shardkit.preshard(directory, out, world_size=4, wrap=wrap).layout
        files = {
            path.name: path.read_bytes()
            for path in out.iterdir()
            if path.suffix != ".json" or "_0." in path.name
        }
        written.append((origin, files))
        content = manifest.load(manifest.read_bytes(str(out)), manifest.NAME)
        assert content is not None
        assert content["layout"]["origin"] == origin
    assert [origin for origin, _ in written] == ["traced", "traced", "traced", "declared"]
    assert {".metadata", "__3_0.distcp", "__3_0.chunks.json"} < written[0][1].keys()
    for _, files in written[1:]:
        assert files == written[0][1]
    names = [chunk.fqn for chunk in chunk_list_of(str(tmp_path / "out-0"), "__1_0.distcp").chunks]
    assert names == sorted(names, key=natural)
    assert names.index(f"{container}.2.mlp.up_proj.weight") < names.index(
        f"{container}.10.mlp.up_proj.weight"
    )


def test_tied_names_are_one_tensor(model_dir: ModelDir) -> None:
    layout = trace(model_dir("llama-tied"), MESH, "auto")
    assert layout.ties == (("model.embed_tokens.weight", "lm_head.weight"),)
    assert "lm_head.weight" not in layout.tensors
    assert layout.tensors["model.embed_tokens.weight"].unit == 0


def test_a_tie_of_four_names_and_modules_kept_in_fp32(model_dir: ModelDir) -> None:
    directory = model_dir("t5")
    layout = trace(directory, MESH, "auto", dtype=CASTS["fp16"])
    assert layout.ties == (
        ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"),
    )
    assert layout.keep_fp32
    assert "decoder.block.0.layer.2.DenseReluDense.wo.weight" in layout.keep_fp32
    assert "decoder.block.0.layer.2.DenseReluDense.wi.weight" not in layout.keep_fp32
    for dtype in (None, CASTS["bf16"]):  # transformers: only about fp16
        assert trace(directory, MESH, "none", dtype=dtype).keep_fp32 == frozenset()
    source = source_of(layout, without=("shared.weight",), more={"decoder.embed_tokens.weight": (101, 12)})
    found = Trace(layout=layout, model_class="X", absent_buffers=frozenset())
    assert fit_trace(found, source).ties[0][:2] == ("decoder.embed_tokens.weight", "shared.weight")


def test_a_world_of_1024_ranks_is_one_process(model_dir: ModelDir) -> None:
    layout = trace(model_dir("qwen3"), parse_mesh("dp_replicate=32,dp_shard=32", None), "auto")
    assert placements(layout, "model.layers.1.self_attn.q_norm.weight") == ["R", "S(0)"]
    owners = list(layout.owners("model.embed_tokens.weight"))
    assert len(owners) == 27  # 101 rows over 32: 25 of 4, one of 1, and the empty one
    assert owners[-1][1].sizes == (0, 24)


@pytest.mark.parametrize(
    ("wrap", "units"),
    [
        ("none", []),
        ("GPT2Block", ["transformer.h.0", "transformer.h.1"]),
        ("auto", ["transformer.h.0", "transformer.h.1"]),
        ("transformers.models.gpt2.modeling_gpt2.GPT2Block", ["transformer.h.0", "transformer.h.1"]),
        ("transformer.h", ["transformer.h.0", "transformer.h.1"]),
        ("GPT2MLP,h.0", ["transformer.h.0", "transformer.h.0.mlp", "transformer.h.1.mlp"]),
    ],
)
def test_policies_name_units(model_dir: ModelDir, wrap: str, units: list[str]) -> None:
    layout = trace(model_dir("gpt2"), MESH, wrap)
    assert [unit.path for unit in layout.units] == ["", *units]
    assert layout.ties == (("transformer.wte.weight", "lm_head.weight"),)


def test_units_that_no_split_modules_names_in_parts(model_dir: ModelDir) -> None:
    layout = trace(model_dir("bert"), MESH, "auto")
    assert [unit.class_name for unit in layout.units] == [
        "BertModel",
        "BertEmbeddings",
        "BertLayer",
        "BertLayer",
    ]
    assert layout.tensors["pooler.dense.weight"].unit == 0


def test_auto_leaves_what_is_tied_across_units_to_the_root(model_dir: ModelDir) -> None:
    layout = trace(model_dir("bert-lm"), MESH, "auto")
    assert [unit.path for unit in layout.units] == ["", "bert.encoder.layer.0", "bert.encoder.layer.1"]
    assert ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight") in layout.ties


def test_a_tie_across_units_is_refused(model_dir: ModelDir) -> None:
    with pytest.raises(LayoutError) as caught:
        trace(model_dir("bert-lm"), MESH, "BertEmbeddings,BertLayer")
    assert caught.value.problems == (
        "bert.embeddings.word_embeddings.weight (unit bert.embeddings) and cls.predictions.decoder.weight (unit root)",
    )
    assert "--wrap BertLayer" in (caught.value.hint or "")


def test_two_ties_in_the_root_are_fine(model_dir: ModelDir) -> None:
    layout = trace(model_dir("bert-lm"), MESH, "BertLayer")
    assert len(layout.ties) == 2


def test_unknown_classes_list_those_that_exist(model_dir: ModelDir) -> None:
    with pytest.raises(PolicyError) as caught:
        trace(model_dir("llama"), MESH, "LlamaDecodeLayer,Nothing")
    assert "LlamaDecodeLayer  (closest name: LlamaDecoderLayer), Nothing" in caught.value.message
    assert caught.value.problems[0] == "LlamaDecoderLayer  (11 modules)"


FUNCTIONS = """
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

def columns(model, mesh):
    model.register_buffer("steps", torch.zeros((), device="meta"))
    model.model.embed_tokens.register_buffer("hidden", torch.zeros(2, device="meta"), persistent=False)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 and p.shape[1] % 4 == 0 else None)
    fully_shard(model, mesh=mesh, ignored_params={model.model.norm.weight})

def layers_only(model, mesh):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)

def inner_axis(model, mesh):
    fully_shard(model, mesh=mesh["dp_shard"])

def other_mesh(model, mesh):
    from torch.distributed.device_mesh import init_device_mesh
    fully_shard(model, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",)))

def views(model, mesh):
    from torch.distributed.device_mesh import init_device_mesh
    cube = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    block = model.model.layers[0]
    fully_shard(block.mlp, mesh=cube["a", "c"]._flatten("ac"))
    fully_shard(block.self_attn, mesh=cube["b"])
    fully_shard(block, mesh=cube["a", "b", "c"]._flatten("abc"))
    block = model.model.layers[1]
    block.mlp.up_proj.weight = torch.nn.Parameter(
        distribute_tensor(block.mlp.up_proj.weight, cube["c"], [Shard(1)], src_data_rank=None))
    fully_shard(block, mesh=cube["a", "b"])
    fully_shard(model, mesh=mesh)

def irregular(model, mesh):
    from torch.distributed.device_mesh import DeviceMesh
    fully_shard(model, mesh=DeviceMesh("cpu", [0, 3, 1, 2]))

def elsewhere(model, mesh):
    from torch.distributed.device_mesh import DeviceMesh
    fully_shard(model, mesh=DeviceMesh("cpu", [2, 0]))

def over_replicas(model, mesh):
    from torch.distributed.device_mesh import init_device_mesh
    fully_shard(model, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",)))

def checkpointed(model, mesh):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    for n, layer in enumerate(model.model.layers):
        model.model.layers[n] = fully_shard(checkpoint_wrapper(layer), mesh=mesh)
    fully_shard(model, mesh=mesh)

def nothing(model, mesh):
    print("noise on stdout")

def failing(model, mesh):
    print("told before it failed")
    raise KeyError("no such layer")

def leaving(model, mesh):
    import sys
    sys.exit("no\\x1b GPU")

number = 3
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module my_wrap.py in the current directory."""
    (tmp_path / "my_wrap.py").write_text(FUNCTIONS)
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("functions")
def test_a_function_decides_placements(model_dir: ModelDir) -> None:
    found = trace_model(model_dir("llama-tied", num_hidden_layers=2), MESH, "my_wrap:columns")
    layout = found.layout
    assert [unit.path for unit in layout.units] == ["", "model.layers.0", "model.layers.1"]
    assert placements(layout, "model.layers.1.self_attn.q_proj.weight") == ["S(1)"]
    assert placements(layout, "model.layers.1.mlp.down_proj.weight") == ["S(0)"]
    assert placements(layout, "model.norm.weight") == ["R"]
    assert not layout.tensors["model.norm.weight"].is_buffer
    assert layout.tensors["steps"].is_buffer
    assert placements(layout, "steps") == ["R"]
    assert "model.embed_tokens.hidden" in found.absent_buffers


@pytest.mark.usefixtures("functions")
def test_what_a_function_leaves_alone_is_replicated(model_dir: ModelDir) -> None:
    layout = trace(model_dir("llama", num_hidden_layers=2), MESH, "my_wrap:layers_only")
    assert placements(layout, "lm_head.weight") == ["R"]
    assert [unit.path for unit in layout.units] == ["", "model.layers.0", "model.layers.1"]


@pytest.mark.usefixtures("functions")
def test_an_axis_that_a_function_does_not_use_holds_copies(model_dir: ModelDir) -> None:
    mesh = parse_mesh("dp_replicate=2,dp_shard=3", None)
    layout = trace(model_dir("llama", num_hidden_layers=1), mesh, "my_wrap:inner_axis")
    assert placements(layout, "lm_head.weight") == ["R", "S(0)"]


@pytest.mark.usefixtures("functions")
def test_another_mesh_of_the_same_ranks_is_the_same_mesh(model_dir: ModelDir) -> None:
    layout = trace(model_dir("llama", num_hidden_layers=1), MESH, "my_wrap:other_mesh")
    assert placements(layout, "lm_head.weight") == ["S(0)"]
    assert layout.tensors["lm_head.weight"].mesh is None


@pytest.mark.usefixtures("functions")
def test_tensors_lie_on_submeshes_and_flattened_axes(model_dir: ModelDir) -> None:
    layout = trace(
        model_dir("llama", num_hidden_layers=2), parse_mesh("dp_shard=4,tp=2", None), "my_wrap:views"
    )

    def steps(fqn: str) -> object:
        mesh = layout.tensors[fqn].mesh
        return mesh and (mesh.names, mesh.digits)

    first, second = "model.layers.0", "model.layers.1"
    assert steps(f"{first}.mlp.up_proj.weight") == (("ac",), (((2, 4), (2, 1)),))
    assert steps(f"{first}.self_attn.q_proj.weight") == (("b",), (((2, 2),),))
    assert steps(f"{first}.input_layernorm.weight") == (("abc",), (((8, 1),),))
    assert steps(f"{second}.mlp.up_proj.weight") == (("a", "b", "c"), (((2, 4),), ((2, 2),), ((2, 1),)))
    assert placements(layout, f"{second}.mlp.up_proj.weight") == ["R", "S(0)", "S(1)"]
    assert placements(layout, "lm_head.weight") == ["R", "S(0)"]  # HSDP over the two axes of --mesh
    owners = [rank for rank, _ in layout.owners(f"{first}.mlp.up_proj.weight")]
    assert owners == [0, 1, 4, 5]  # the lowest of those that b copies


@pytest.mark.usefixtures("functions")
def test_replicas_cannot_hold_parts(model_dir: ModelDir) -> None:
    mesh = parse_mesh("dp_replicate=2,dp_shard=2", None)
    with pytest.raises(LayoutError) as caught:
        trace(model_dir("llama", num_hidden_layers=1), mesh, "my_wrap:over_replicas")
    assert "over ranks that hold copies in --mesh dp_replicate=2,dp_shard=2" in caught.value.problems[0]


def test_a_mesh_asks_for_plans_of_the_class(model_dir: ModelDir) -> None:
    with pytest.raises(PolicyError) as caught:
        trace(model_dir("llama", num_hidden_layers=1), parse_mesh("dp_shard=4,ep=2", None), "auto")
    assert "LlamaForCausalLM has no ep_plan" in caught.value.message


@pytest.mark.usefixtures("functions")
def test_names_are_those_of_the_state_dict(model_dir: ModelDir) -> None:
    layout = trace(model_dir("llama", num_hidden_layers=1), MESH, "my_wrap:checkpointed")
    assert [unit.path for unit in layout.units] == ["", "model.layers.0"]
    assert layout.tensors["model.layers.0.mlp.up_proj.weight"].unit == 1


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize(
    ("wrap", "error", "message"),
    [
        ("my_wrap:nothing", PolicyError, "no module of the model is sharded"),
        ("my_wrap:failing", PolicyError, "KeyError: 'no such layer'"),
        ("my_wrap:leaving", PolicyError, "the function failed: it called sys.exit('no\\x1b GPU')"),
        ("leaves:whole", PolicyError, "cannot import whole from leaves: it called sys.exit(3)"),
        ("my_wrap:absent", PolicyError, "cannot import absent from my_wrap"),
        ("my_warp:nothing", PolicyError, "cannot import nothing from my_warp: ModuleNotFoundError"),
        ("my_wrap.number", PolicyError, "is not a class"),
        ("my_wrap:irregular", LayoutError, "placements that are not supported"),
        ("my_wrap:elsewhere", LayoutError, "placements that are not supported"),
    ],
)
def test_a_function_that_does_not_do(model_dir: ModelDir, wrap: str, error: type, message: str) -> None:
    with pytest.raises(error) as caught:
        trace(model_dir("llama", num_hidden_layers=1), MESH, wrap)
    assert message in caught.value.message
    if wrap.endswith("failing"):
        assert "told before it failed" in caught.value.problems


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": None}, "names no architecture"),
        ({"architectures": ["NoSuchModel"]}, "has no NoSuchModel"),
        ({"architectures": ["pipeline"]}, "has no pipeline"),
        ({"model_type": "no\x1bsuch"}, "model_type 'no"),
    ],
)
def test_a_model_that_cannot_be_built_is_told_apart(
    model_dir: ModelDir, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(CannotBuildError) as caught:
        trace(model_dir("llama", **changes), MESH, "auto")
    assert message in caught.value.message
    assert caught.value.message.isprintable()


def test_a_model_that_fails_to_build_shows_why(model_dir: ModelDir) -> None:
    with pytest.raises(LayoutError) as caught:
        trace(model_dir("llama", num_attention_heads="four"), MESH, "auto")
    assert not isinstance(caught.value, CannotBuildError)
    assert "cannot be built and wrapped" in caught.value.message
    assert any("Traceback" in line or "Error" in line for line in caught.value.problems)


REMOTE = """
open({mark!r}, "w").close()
import torch
from transformers import PreTrainedConfig, PreTrainedModel

class OwnConfig(PreTrainedConfig):
    model_type = "own"

class OwnBlock(torch.nn.Linear):
    pass

class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    _no_split_modules = "OwnBlock"
    def __init__(self, config):
        super().__init__(config)
        self.block = OwnBlock(3, 5)
        self.post_init()
"""


def test_own_code_runs_only_when_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "own"
    directory.mkdir()
    mark = tmp_path / "ran"
    (directory / "own_code.py").write_text(REMOTE.format(mark=str(mark)))
    (directory / "json.py").write_text(f"open({str(mark)!r}, 'w')")
    auto_map = {"AutoConfig": "own_code.OwnConfig", "AutoModel": "own_code.OwnModel"}
    config = {"architectures": ["OwnModel"], "model_type": "own", "auto_map": auto_map}
    (directory / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(directory)
    with pytest.raises(CannotBuildError) as caught:
        trace(str(directory), MESH, "auto")
    assert "--trust-remote-code" in (caught.value.hint or "")
    assert not mark.exists()
    layout = trace(str(directory), MESH, "auto", trust_remote_code=True)
    assert layout.units[1].class_name == "OwnBlock"
    assert mark.exists()


def test_native_models_do_without_the_code_that_they_bring(model_dir: ModelDir) -> None:
    auto_map = {"AutoConfig": "gone.Config", "AutoModelForCausalLM": "gone.LlamaForCausalLM"}
    assert trace(model_dir("llama", auto_map=auto_map), MESH, "auto").origin == "traced"


def test_make_layout_traces_and_keeps_the_sources_names(model_dir: ModelDir) -> None:
    directory = model_dir("llama-tied", num_hidden_layers=1)
    layout = trace(directory, MESH, "auto")
    head_only = source_of(layout, without=("model.embed_tokens.weight",), more={"lm_head.weight": (101, 24)})
    found = make_layout(fake_model(directory, head_only), MESH, "auto")
    assert found.ties == (("lm_head.weight", "model.embed_tokens.weight"),)
    assert found.tensors["lm_head.weight"].fqn == "lm_head.weight"
    assert found.notes == ()


def test_make_layout_declares_what_cannot_be_built(model_dir: ModelDir) -> None:
    directory = model_dir("llama", architectures=["NoSuchForCausalLM"], num_hidden_layers=1)
    names = {"model.layers.0.w": (4, 2), "model.embed_tokens.weight": (8, 2)}
    tensors = source_of(Layout(origin="declared", mesh=MESH, units=(), tensors={}), more=names)
    layout = make_layout(fake_model(directory, tensors), MESH, "auto")
    assert layout.origin == "declared"
    assert "not checked against a model: transformers" in layout.notes[0]
    with pytest.raises(PolicyError, match="has no NoSuchForCausalLM"):
        make_layout(fake_model(directory, tensors), MESH, "LlamaDecoderLayer")


@pytest.fixture
def bert(model_dir: ModelDir) -> Trace:
    return trace_model(model_dir("bert"), MESH, "auto")


def test_buffers_that_are_not_saved_are_omitted(bert: Trace, tmp_path: Path) -> None:
    more = {"embeddings.position_ids": (1, 17), "encoder.position_ids": (1, 17)}
    source = source_of(bert.layout, more=more)
    names = {name: entry.shape for name, entry in source.items()}
    layout = fit_trace(trace_model(str(tmp_path / "bert"), MESH, "auto", names=names), source)
    assert [name for name, _ in layout.omitted] == list(more)
    assert "makes itself" in layout.omitted[0][1]
    assert "transformers leaves it out" in layout.omitted[1][1]


def test_every_difference_is_listed(bert: Trace) -> None:
    more = {"pooler.dense.wieght": (12, 12), "pooler.dense.bias": (13,)}
    with pytest.raises(LayoutError) as caught:
        fit_trace(bert, source_of(bert.layout, without=("pooler.dense.weight",), more=more))
    assert caught.value.message == (
        "BertModel and its files do not fit each other; tensors in the files but not in the model: 1,"
        " in the model but not in the files: 1, of another shape: 1"
    )
    assert caught.value.problems == (
        "pooler.dense.bias: [13] in the source, [12] in the model",
        "pooler.dense.wieght: in the files, not in BertModel  (closest name: pooler.dense.weight)",
        "pooler.dense.weight: in BertModel, not in the files  (closest name: pooler.dense.wieght)",
    )


def renamed(bert: Trace, rename: Callable[[str], str]) -> dict[str, TensorEntry]:
    return {rename(name): entry for name, entry in source_of(bert.layout).items()}


@pytest.mark.parametrize("prefix", ["bert.", "model.bert."])
def test_names_with_another_prefix_need_key_rules(bert: Trace, prefix: str) -> None:
    with pytest.raises(
        LayoutError, match="transformers does not know how to turn one into the other"
    ) as caught:
        fit_trace(bert, renamed(bert, lambda name: prefix + name))
    assert caught.value.hint is not None
    for way in ("--keys RULES.toml", "--dry-run", "--names hub"):
        assert way in caught.value.hint


def test_a_part_with_another_prefix_needs_key_rules(bert: Trace) -> None:
    with pytest.raises(LayoutError, match="module names differ"):
        fit_trace(bert, renamed(bert, lambda name: name.replace("encoder.layer.0", "bert.encoder.layer.0")))


def test_fused_experts_need_key_rules(bert: Trace) -> None:
    more = {f"encoder.layer.0.mlp.experts.{n}.up.weight": (2, 2) for n in range(3)}
    layout = bert.layout
    fused = layout.tensors["pooler.dense.weight"]
    tensors = {**layout.tensors, "encoder.layer.0.mlp.experts.gate_up_proj": fused}
    found = Trace(
        layout=Layout(origin="traced", mesh=MESH, units=layout.units, tensors=tensors),
        model_class="X",
        absent_buffers=frozenset(),
    )
    with pytest.raises(LayoutError, match="module names differ"):
        fit_trace(found, source_of(layout, more=more))


def test_names_of_a_compiled_model_are_said_to_be_such(bert: Trace) -> None:
    with pytest.raises(LayoutError) as caught:
        fit_trace(bert, renamed(bert, lambda name: "_orig_mod." + name))
    assert "torch.compile" in (caught.value.hint or "")
    with pytest.raises(LayoutError) as caught:  # as FSDP with a compiled layer names them
        fit_trace(bert, renamed(bert, lambda name: name.replace("layer.1.", "layer.1._orig_mod.")))
    assert "torch.compile" in (caught.value.hint or "")
    with pytest.raises(LayoutError) as caught:  # another name is missing too
        fit_trace(bert, renamed(bert, lambda name: "_orig_mod." + name.replace("pooler", "puller")))
    assert "torch.compile" not in (caught.value.hint or "")


def test_a_quantization_config_that_says_nothing_is_named(bert: Trace) -> None:
    source = source_of(bert.layout, more={"classifier.weight": (1, 1)})
    with pytest.raises(LayoutError) as caught:
        fit_trace(bert, source, {"quantization_config": {}})
    assert "a quantization_config that does not say how" in (caught.value.hint or "")


def test_a_child_that_dies_or_hangs_is_an_error_of_the_environment(
    model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(payload: bytes, timeout_s: float) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess([], -9, stdout=b"one\n\ntwo\x1b\n")

    def slow(payload: bytes, timeout_s: float) -> subprocess.CompletedProcess[bytes]:
        raise subprocess.TimeoutExpired([], timeout_s, output=b"last words\n")

    directory = model_dir("llama")
    monkeypatch.setattr(traced, "_serve_request", killed)
    with pytest.raises(ResourceError, match="by signal 9") as caught:
        trace(directory, MESH, "auto")
    assert caught.value.problems == ("one", "two\\x1b")
    monkeypatch.setattr(traced, "_serve_request", slow)
    with pytest.raises(ResourceError, match="longer than 600 s"):
        trace(directory, MESH, "auto")


def test_choosing_imports_no_torch() -> None:
    code = "import sys, shardkit.layout.choice.choose; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
