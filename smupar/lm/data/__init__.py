"""Turns text into tokens on disk, and tokens into batches.

prepare       ``smupar data prepare``
sources       the texts that it reads
source_file   one file of such a text, hashed while it is read
tokenizer     text to token ids and back
shards        prepared text on disk: token files, and an index that describes them
shard_writer  writes shards
shard_hashes  compares shards with the hashes in their index
tokens        all shards as one sequence
batches       batches, as a pure function of (seed, step)
"""
