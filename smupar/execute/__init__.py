"""Ways to run a step: many models as one (``stacked``), as a CUDA graph, or with sparse storage. Also measures how long it
takes."""
