"""No deadlines: a busy machine is not a failing property."""

from hypothesis import settings

settings.register_profile("shardkit", deadline=None)
settings.load_profile("shardkit")
