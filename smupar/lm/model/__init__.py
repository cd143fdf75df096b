"""The GPT (``gpt``), and an estimate of what a run costs (``cost``)."""
