"""Read and write files of `torch.save` without torch: zip, pickle and tensors. Nothing in a file is ever executed.

Internal: import from `shardkit`.
"""
