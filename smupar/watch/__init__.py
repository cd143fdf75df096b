"""`smupar watch`: a local page for running and finished studies, runs, checks, reproductions and traces.

`sources` finds what folders hold, and makes a document of each source (`output/page`). `runs` reads runs that belong to no
study. `server` serves the page and its JSON. Watching only reads. So any number of watchers can watch the same folder while a
study writes into it, even from other machines. This package does not load torch.

GET /                                       the page
GET /state.json                             all entries: key, title, headline, folder, is_live, version
GET /document.json?key=K                    one document; its version changes with its content
GET /curves.json?key=K&runs=A,B             step, loss and validation loss of these runs
GET /run.json?key=K&run=A                   a run: configuration, curve, files
GET /files/K/PATH                           a file below the folder of K: .csv .json .jsonl .png .txt
Any other path gets 404, any other method 405, and a Host header with a foreign name 403.
"""
