"""The exhibits. Each fig<number>_<topic>.py computes a table, data/<topic>.csv, and draws it to out/<topic>.pdf, .png.

`mxsim figures` (or `python -m paper_figures`) makes all of them and README.md, `mxsim figures scale_rules` only those
named; `mxsim report` puts them into one HTML file.
"""
