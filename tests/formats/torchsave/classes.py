"""Tensors of classes of torchao and xtuner, as those classes wrote them; none of them is needed to read them."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path
from zlib import crc32

ARCHIVE = Path(__file__).parents[2] / "data" / "classes" / "records.tar.xz"
UNREADABLE = {
    "torchao-0.18-int8-quantised.pt": (
        "torchao.prototype.quantized_training.int8.Int8QuantizedTrainingLinearWeight, which is made of int_data, scale"
    ),
    "torchao-0.18-nf4.pt": (
        "torchao.quantization.quantize_.workflows.nf4.nf4_tensor.NF4Tensor, which is made of quantized_scalers, "
        "quantization_factor, scaler_mean, quantized_data, nf4"
    ),
    "torchao-0.18-optim-4bit.pt": (
        "torchao.optim.subclass_4bit.OptimState4bit, which is made of codes, scale, qmap"
    ),
    "torchao-0.18-optim-8bit.pt": (
        "torchao.optim.subclass_8bit.OptimState8bit, which is made of codes, scale, qmap"
    ),
    "torchao-0.18-optim-fp8.pt": "torchao.optim.subclass_fp8.OptimStateFp8, which is made of codes, scale",
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
