"""Bytes at rest and on the move: host memory, files and their engines, shards and their tiers."""
