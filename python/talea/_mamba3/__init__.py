"""The Mamba-3 scan: talea.mamba3, talea.mamba3_step and what stands behind them."""
