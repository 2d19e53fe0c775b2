"""The schema of the SQLite ledger, as a list of migrations ``NNNN_name.sql``. Each migration is one transaction, and is
never changed after its release. A new ledger applies all migrations, an older ledger only the missing ones."""
