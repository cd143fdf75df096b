"""Turns text into tokens on disk, and tokens into batches.

prepare       ``smupar data prepare``; sources: the texts it reads, source_file: one of them
tokenizer     text to token ids and back
shards        prepared text on disk: the index of its files; shard_writer, shard_hashes: write and compare these
tokens        all shards as one sequence
batches       batches, as a pure function of (seed, step)
"""
