"""One server shell for every HTTP door: connections that stand still are cut, the oldest without a token goes first."""
