"""BalanceKV (Han et al. 2025)."""
