"""Ways to run a step: many models as one (``stacked``), as a CUDA graph, with sparse storage; and how long it takes."""
