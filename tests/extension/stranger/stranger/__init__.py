"""What a stranger adds to Headrace."""
