"""Models as the Hub has them: config, tokenizer, weights in safetensors or `.bin`, here or in a repo.

Internal: import from `shardkit`.
"""
