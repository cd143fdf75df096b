"""The command line. ``main`` parses argv into a call, ``commands`` holds the commands, ``flags`` makes their flags, and
``resolve`` turns the typed flags into a configuration."""
