"""What a run and each command is made of, as frozen dataclasses; presets; checks. No torch in here."""
