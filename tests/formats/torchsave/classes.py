"""Tensors of classes of torchao, xtuner, bitsandbytes and others, as those classes wrote them; none of them is needed to read them."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path
from zlib import crc32

ARCHIVE = Path(__file__).parents[2] / "data" / "classes" / "records.tar.xz"
_TORCHAO = {
    "int8-quantised": "prototype.quantized_training.int8.Int8QuantizedTrainingLinearWeight: int_data, scale",
    "nf4": (
        "quantization.quantize_.workflows.nf4.nf4_tensor.NF4Tensor: "
        "quantized_scalers, quantization_factor, scaler_mean, quantized_data, nf4"
    ),
    "optim-4bit": "optim.subclass_4bit.OptimState4bit: codes, scale, qmap",
    "optim-8bit": "optim.subclass_8bit.OptimState8bit: codes, scale, qmap",
    "optim-fp8": "optim.subclass_fp8.OptimStateFp8: codes, scale",
}
_ENGINE = {
    "2.9-float8": "float8_tensor.Float8Tensor: 2 plain tensors",
    "2.9-mxfp8": "mxfp8_tensor.MXFP8Tensor: 2 plain tensors",
    "2.20-float8": "float8_tensor.Float8Tensor: 2 plain tensors",
    "2.20-nvfp4": "nvfp4_tensor.NVFP4Tensor: 3 plain tensors",
}
_QUANTISED = {
    **{f"torchao-0.18-{name}.pt": ("torchao", f"torchao.{made}") for name, made in _TORCHAO.items()},
    **{
        f"transformer_engine-{name}.pt": ("TransformerEngine", f"transformer_engine.pytorch.tensor.{made}")
        for name, made in _ENGINE.items()
    },
    "bitsandbytes-0.50-4bit.pt": ("bitsandbytes", "bitsandbytes.nn.Params4bit: data, quant_state"),
    "bitsandbytes-0.50-8bit.pt": ("bitsandbytes", "bitsandbytes.nn.Int8Params: data, SCB"),
    "quanto-0.2-qint8.pt": (
        "quanto",
        "optimum.quanto.tensor.weights.qbytes.WeightQBytesTensor: _data, _scale",
    ),
}
UNREADABLE = {
    file: made.replace(": ", ", which is made of ")
    + ("" if "optim" in file or file.endswith("quantised.pt") else f": quantised by {package}")
    for file, (package, made) in _QUANTISED.items()
}


def unpacked(folder: Path) -> Path:
    """The archive's records, and its checkpoints `float8` and `adamw8bit`."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def respell(path: Path, old: bytes, new: bytes) -> None:
    """Change text of the pickle of a file's only record, and the CRC-32s with it; the length stays."""
    assert len(old) == len(new)
    with zipfile.ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        pickle = archive.read(name)
    assert old in pickle
    digests = [crc32(each).to_bytes(4, "little") for each in (pickle, pickle.replace(old, new))]
    data = path.read_bytes().replace(pickle, pickle.replace(old, new)).replace(*digests)
    path.write_bytes(data)
