"""Text into tokens on disk, and tokens into batches."""
