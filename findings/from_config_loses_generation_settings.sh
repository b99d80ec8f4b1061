#!/bin/bash
# transformers 5: a model made by from_config has lost what config.json says about generation, and from_pretrained has not.
#
# The config object drops num_beams, forced_bos_token_id and the like when it is made, so that a model built from it, whatever
# fills its weights, generates another text than from_pretrained of the same directory, which reads config.json once more.
# Older models of BART, Marian and T5 have no generation_config.json, only such a config.json. No warning is printed.
#
# Output seen with transformers 5.24.0:
#   num_beams in config.json: 4
#   of the config object:     None
#   as from_config has it:    None
#   as from_pretrained:       4
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q transformers==5.24.0
cat > "$place/config.json" <<'JSON'
{"model_type": "marian", "architectures": ["MarianMTModel"], "d_model": 16, "vocab_size": 32, "pad_token_id": 0,
 "eos_token_id": 1, "decoder_start_token_id": 0, "num_beams": 4, "transformers_version": "4.22.0"}
JSON
"$place/venv/bin/python" - "$place" 2>/dev/null <<'PYTHON'
import json
import sys

import transformers
from transformers import AutoConfig, GenerationConfig

directory = sys.argv[1]
raw = json.load(open(f"{directory}/config.json"))
config = AutoConfig.from_pretrained(directory)
made = GenerationConfig.from_model_config(config)  # what a model's __init__ does
loaded = GenerationConfig.from_pretrained(directory, config_file_name="config.json", _from_model_config=True)
print("transformers", transformers.__version__)
print("num_beams in config.json:", raw["num_beams"])
print("of the config object:    ", getattr(config, "num_beams", None))
print("as from_config has it:   ", made.num_beams)
print("as from_pretrained:      ", loaded.num_beams)
sys.exit(0 if (made.num_beams, loaded.num_beams) == (None, 4) else 1)
PYTHON
