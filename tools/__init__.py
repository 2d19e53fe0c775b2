"""Programs for the developers of Headrace; they are not part of the library."""
