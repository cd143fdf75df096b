"""The paper's figures and tables: one short file each, which ends with a ``FIGURE`` of what to run, to draw and to claim."""
