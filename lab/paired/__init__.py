"""Two versions of the code measured in alternation on one machine: the reference of an older checkout, and this one."""
