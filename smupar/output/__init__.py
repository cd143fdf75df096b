"""What smupar writes and shows.

files            atomic writes and locks
json_files       JSON with checksums
checksums        checksums of large files
private_folders  folders that no other user can write to
tables           text tables
terminal         what a stream can show
progress         a line of progress
pictures         figures of matplotlib
colours          the colours of rules
page             the page of studies, runs, checks, reproductions and traces
optional         imports packages that only some commands need
"""
