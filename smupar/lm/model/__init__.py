"""The GPT: its layers, many of them as one stack, loading, and what it costs."""
