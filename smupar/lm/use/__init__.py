"""What is done with a trained model: generate, export, score; and the coordinate check of the GPT."""
