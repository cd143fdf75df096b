"""Side-by-side measurements of complete models (``models``) and of sparse layers (``sparse``)."""
