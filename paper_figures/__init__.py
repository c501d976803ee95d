"""The figures. Each fig_<topic>.py computes a table, data/<topic>.csv, and draws it to out/<topic>.pdf and .png.

A file may have the paper's number, as fig5_loss_curves.py.
`python -m paper_figures` makes all of them, `python -m paper_figures scale_rules` only those named.
"""
