"""Which rank holds which region of which tensor: traced from the real model by a wrap policy, or declared.

Internal: import from `shardkit`.
"""
