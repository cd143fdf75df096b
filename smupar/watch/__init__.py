"""`smupar watch`: a local page for running and finished studies, runs, checks, reproductions and traces.

`things` finds what folders hold, and makes its documents (`output/page`); `runs` reads runs that belong to no study; `server`
serves the page and its JSON. It only reads: nothing in a folder changes, so any number of watchers may look at the same one,
from other machines too, while a study writes. It does not load torch.

GET /                                       the page
GET /state.json                             what there is: key, title, folder, version
GET /document.json?key=K                    one document; its version changes with its content
GET /curves.json?key=K&runs=A,B             step, loss and validation loss of runs
GET /run.json?key=K&run=A                   a run: configuration, curve, files
GET /files/K/PATH                           a file below the folder of K: .csv .json .jsonl .png .txt
Everything else is 404; other methods are 405; another name in the Host header than asked for is 403.
"""
