"""Helpers of the notebooks; installed as `jaxkv.colab`."""
