"""Training on given rows: ``headrace sft`` imitates them, ``headrace dpo`` learns which of two answers is preferred.

    files ──read──▶ rows ──render──▶ tokens with a loss mask ──order──▶ batches ──▶ the learner ──▶ checkpoints
    (sources)       (reading)        (rendering)               (order)     │  the same as of ``headrace train``
                                                                           └──▶ ledger: which row in which step

All rows are rendered and checked before the first step, so that a row that cannot be trained is refused, or left out
and counted, before anything is changed. The order of rows is a function of the seed and the row's place in the run:
there is no position to lose, and a resumed run trains the same batches.
"""
