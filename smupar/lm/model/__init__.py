"""The GPT (``gpt``), and an estimate of the cost of a run (``cost``)."""
