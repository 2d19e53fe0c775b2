"""The checks of ``headrace doctor``: of this machine, of a model's directory, or of the weights that a server uses.

this machine ──machine──┐
a directory ──directory─┼──▶ findings, each with a remedy and, for a known fault, its name
a server ──server──▶ logprobs ──┐
directories ──candidates──▶ logits ──diagnosis──▶ the candidate that explains the server's numbers
"""
