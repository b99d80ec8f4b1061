"""Hub models: config, tokenizer, weights in safetensors or `.bin`; in a directory or in a repo of the Hub.

Internal: import from `shardkit`.
"""
