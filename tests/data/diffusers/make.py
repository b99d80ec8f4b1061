"""A tiny model of diffusers as its own `save_pretrained` writes it: whole, sharded, a sharded variant, and a LoRA of it.

Usage: python make.py, in this directory. Made with diffusers 0.42.1, peft 0.21.2, torch 2.13.0, safetensors 0.8.0.
"""

from __future__ import annotations

import torch
from diffusers import UNet2DConditionModel
from peft import LoraConfig

torch.manual_seed(0)
model = UNet2DConditionModel(
    sample_size=4,
    in_channels=1,
    out_channels=1,
    block_out_channels=(2,),
    layers_per_block=1,
    down_block_types=("CrossAttnDownBlock2D",),
    up_block_types=("UpBlock2D",),
    mid_block_type=None,
    norm_num_groups=1,
    cross_attention_dim=2,
    attention_head_dim=1,
).half()
model.save_pretrained("whole")
model.save_pretrained("sharded", max_shard_size="1KB")
model.save_pretrained("sharded-fp16", max_shard_size="1KB", variant="fp16")
model.add_adapter(LoraConfig(r=1, lora_alpha=8, target_modules=["to_q"]))
model.save_lora_adapter("lora")
