"""Integrations with other tools. Each has its own module, which imports the tool when it is used."""
