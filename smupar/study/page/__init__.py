"""The page of a study: ``view`` makes its document, and ``run_table`` the table of its runs."""
