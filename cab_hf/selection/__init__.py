"""Selection of key blocks: which blocks each query block attends to."""
