"""Sessions in which a program of bash runs the commands, wherever they are: containers, and what others host."""
