"""StreamingLLM (Xiao et al. 2024)."""
