"""The command line: parsing argv into a call (``main``), the commands, their flags, and turning what was typed into a
configuration."""
