"""Uses of a trained model: load, generate, export, score and verify. Also the coordinate check of the built-in GPT."""
