"""The configurations of runs and commands as frozen dataclasses, presets, and checks. Nothing here imports torch."""
