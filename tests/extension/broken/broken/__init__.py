"""What nobody should install."""
