"""Turns text into tokens on disk, and tokens into batches."""
