"""Long texts with hidden facts, and questions about them."""
