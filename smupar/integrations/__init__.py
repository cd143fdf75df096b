"""Other people's tools, each in a module of its own that imports its tool when it is used."""
