"""One offloaded model: `offload()`, its runtime and its step, deferred init, the public calls."""
