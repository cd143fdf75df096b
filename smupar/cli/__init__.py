"""The command line: argv into a call (``main``), the commands, their flags, and what was typed into a configuration."""
