"""Uses of a trained model: load, generate, export and score. Also the coordinate check of the GPT."""
