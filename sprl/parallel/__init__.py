"""Meshes and the rules that shard by logical axis name."""
