"""Records of the tests with known answers and of agreement with other libraries."""
