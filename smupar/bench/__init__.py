"""Side-by-side measurements: whole models (``models``) and sparse layers (``sparse``)."""
