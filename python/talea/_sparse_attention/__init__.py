"""Sparse attention and its indexer. The package has an underscore because `talea.sparse_attention`
is the function, and a module of that name would take its place."""
