"""What only the notebooks need; installed as `jaxkv.colab`."""
