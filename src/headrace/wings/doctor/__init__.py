"""``headrace doctor``: what is wrong with this machine, with a model's directory, or with the weights of a server.

this machine ──machine──┐
a directory ──directory─┼──▶ findings, each with a remedy and, for a known fault, its name
a server ──server──▶ logprobs ──┐
directories ──candidates──▶ logits ──diagnosis──▶ the candidate that explains the server's numbers
"""
