"""What one call of attention is: the mask, the order of its tokens, and what is refused."""
