"""The paper's figures and tables: one short file each, with ``runs(scale)``, ``draw(rows)`` and ``claim(rows)``."""
