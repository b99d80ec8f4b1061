#!/bin/bash
# torch's HuggingFaceStorageWriter saves a state dict that has a number beside its tensors without an error, and torch's own
# reader of that format cannot open the file.
#
# The writer puts a record of torch.save before the safetensors data of the same file. So the first eight bytes, which
# safetensors reads as the length of the header, are the beginning of a zip. The tensors are all there, behind the record.
#
# Output seen with torch 2.13.0 and safetensors 0.8.0:
#   saved without an error: ['model-00001-of-00001.safetensors', 'model.safetensors.index.json']
#   begins with: b'PK\x03\x04'
#   loading it: an error
#   behind the record: equal
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 safetensors==0.8.0 numpy==2.4.6 huggingface-hub==2.4.0
"$place/venv/bin/python" - "$place/saved" 2> /dev/null <<'PYTHON'
import os
import sys

import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

directory = sys.argv[1]
weight = torch.arange(6.0).reshape(2, 3)
print("torch", torch.__version__, "safetensors", safetensors.__version__)
dcp.save({"weight": weight, "step": 3}, storage_writer=HuggingFaceStorageWriter(directory))
names = sorted(os.listdir(directory))
print("saved without an error:", names)
[name] = [name for name in names if name.endswith(".safetensors")]
data = open(os.path.join(directory, name), "rb").read()
print("begins with:", data[:4])
try:
    dcp.load({"weight": torch.zeros(2, 3)}, storage_reader=HuggingFaceStorageReader(directory))
    failure = None
except BaseException as error:  # CheckpointException is no Exception
    failure = error
print("loading it:", "an error" if failure is not None else "no error")
end = data.rindex(b"PK\x05\x06") + 22  # the record's end, which has no comment
is_equal = torch.equal(safetensors.torch.load(data[end:])["weight"], weight)
print("behind the record:", "equal" if is_equal else "something else")
sys.exit(0 if data.startswith(b"PK\x03\x04") and failure is not None and is_equal else 1)
PYTHON
