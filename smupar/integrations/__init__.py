"""Integrations with other tools. Each has a module of its own, which imports the tool when it is used."""
