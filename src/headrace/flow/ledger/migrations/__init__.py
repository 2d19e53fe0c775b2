"""The schema of the SQLite ledger, as the steps that made it: ``NNNN_name.sql``, each one transaction, never changed
once released. A new ledger takes all of them, an older one those it has not taken."""
