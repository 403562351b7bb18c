"""What: the parts of tools/check_figures: receipts, pages, sidecars, tables, the check itself.
Why: each is small enough to be read whole by somebody who doubts a figure.
Never: anything beyond Python's standard library.
"""
