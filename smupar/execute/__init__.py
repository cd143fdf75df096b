"""Ways to run a step: many models as one (``stacked``), as a CUDA graph (``cuda_graphs``), or with sparse storage (``sparse``).
``timing`` measures the time of a step."""
