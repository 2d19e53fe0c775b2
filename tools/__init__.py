"""What the developers of Headrace run; no part of the library."""
